"""
Survival times, some of them censored
=====================================

10,000 subjects are followed until an event, or until they leave: who leaves lived at least as long. Two models are
fitted, with standard errors. The likelihood of an accelerated failure time, here Weibull's, is a sum over subjects.
Cox's partial likelihood compares each subject that has an event with all who are still there: it is a sum over events.
D. R. Cox, "Regression models and life-tables", *Journal of the Royal Statistical Society B* 34 (1972), 187-202.
"""

import os
import time

import numpy as np
import torch
from matplotlib import pyplot
from scipy import optimize

import batchopt

SUBJECTS, SHAPE = 10_000, 1.5
cores = len(os.sched_getaffinity(0))

# %%
# Subjects
# --------
#
# The logarithm of a time is linear in age, treatment and dose, plus noise. Who leaves before the event is censored: the
# time is that of leaving, and ``event`` is 0. Subjects are sorted by their times, the longest first.

rng = np.random.default_rng(0)
x = np.stack([rng.normal(0, 1.2, SUBJECTS), rng.integers(0, 2, SUBJECTS), rng.lognormal(0, 0.4, SUBJECTS)], 1)
true = np.array([-0.3, 0.5, 0.1])
life, leaves = np.exp(2 + x @ true) * rng.weibull(SHAPE, SUBJECTS), rng.exponential(20, SUBJECTS)
order = np.argsort(-np.minimum(life, leaves))
x, duration, event = x[order], np.minimum(life, leaves)[order], (life <= leaves)[order].astype(float)
print(f"{event.sum():.0f} events, {(1 - event).sum():.0f} censored")

# %%
# Two losses
# ----------
#
# Weibull: an event adds the logarithm of the density, a censored time that of the probability to live longer.
#
# Cox: a sample is the index of an event. The function captures all subjects, and the sum over those at risk ends at
# that index. So events can be cut anywhere, and f and its derivatives are exact for any number of workers. Times are
# all different here; among equal ones, the sum has to end at the last.

subjects, events = torch.from_numpy(x), torch.from_numpy(event.nonzero()[0])
seen = torch.from_numpy(np.stack([np.log(duration), event], 1))


def weibull(module, x, seen):
    log_time, event = seen.T
    z = module["log_shape"].exp() * (log_time - module["constant"] - x @ module["beta"])
    return (z.exp() - event * (module["log_shape"] + z - log_time)).mean()


def cox(module, events, _):
    log_hazards = subjects @ module["beta"]
    return (log_hazards.logcumsumexp(0)[events] - log_hazards[events]).mean()


models = {"Weibull": (weibull, (subjects, seen)), "Cox": (cox, (events,))}


def optimizer(name, parallelize):
    shapes = {"beta": 3} if name == "Cox" else {"beta": 3, "constant": (), "log_shape": ()}
    module = torch.nn.ParameterDict({key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()})
    settings = {"loss_fn": models[name][0], "parallelize": parallelize, "threads_per_worker": 1}
    lbfgs = batchopt.LBFGS(module.parameters(), max_iter=100, tolerance_grad=1e-9, tolerance_change=0)
    return batchopt.BatchOptimizer(module, optimizer=lbfgs, **settings)


found = {}
for name, (_, data) in models.items():
    with optimizer(name, cores) as opt:
        opt.step(*data)
        found[name] = opt.covariance()
        print(f"{name}: {opt.eval_counter} evaluations, AIC {found[name].likelihood.aic:.3f}")

# %%
# The same by NumPy
# -----------------
#
# First and second derivatives of both by hand: Cox's are means and covariances of the properties of those at risk.
# SciPy finds where the first are 0, and the inverse of the second has the errors.


def weibull_by_hand(b):
    z = np.exp(b[4]) * (np.log(duration) - b[3] - x @ b[:3])
    rows = np.column_stack([-np.exp(b[4]) * x, np.full(SUBJECTS, -np.exp(b[4])), z])  # dz/db
    left, second = np.exp(z) - event, rows.T @ (np.exp(z)[:, None] * rows)
    second[4] += left @ rows
    second[:4, 4] = second[4, :4]
    return left @ rows - event.sum() * np.eye(5)[4], second


def cox_by_hand(b):
    hazards, at = np.exp(x @ b), event > 0
    total = hazards.cumsum()
    mean = (hazards[:, None] * x).cumsum(0) / total[:, None]
    square = (hazards[:, None, None] * x[:, :, None] * x[:, None]).cumsum(0) / total[:, None, None]
    second = square - mean[:, :, None] * mean[:, None]
    return (mean - x)[at].sum(0), second[at].sum(0)


for by_hand, ours in ((weibull_by_hand, found["Weibull"]), (cox_by_hand, found["Cox"])):
    b = optimize.root(by_hand, np.array([0, 0, 0, 2.0, 0])[: len(ours.values)], jac=True, tol=1e-12).x
    errors = np.linalg.inv(by_hand(b)[1]).diagonal() ** 0.5
    apart = abs(ours.values.numpy() / b - 1).max(), abs(ours.errors.numpy() / errors - 1).max()
    print(f"{by_hand.__name__}: coefficients differ by {apart[0]:.1e}, standard errors by {apart[1]:.1e}")

# %%
# Two models of one hazard
# ------------------------
#
# Weibull's model is one of Cox's kind: minus its shape times its coefficients are the logarithms of the ratios of
# hazards. ``of`` gives them and their errors. Cox's model leaves the hazard over time open, and its errors are hardly
# larger here. The figure compares Weibull's model with the estimate of Kaplan and Meier, which has no model.

of_weibull = found["Weibull"].of(lambda module: -module["log_shape"].exp() * module["beta"])
for name, ratio in {"Weibull": of_weibull, "Cox": found["Cox"].of(lambda module: module["beta"])}.items():
    print(name, *(f"{value:.4f} +- {error:.4f}" for value, error in zip(ratio.value, ratio.error, strict=True)))
print("true", *(f"{value:.4f}" for value in -SHAPE * true))

figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
times, (*beta, constant, log_shape) = np.linspace(0.01, 30, 200)[:, None], found["Weibull"].values.numpy()
for treated, name in enumerate(["untreated", "treated"]):
    chosen = x[:, 1] == treated
    alive = (1 - event[chosen] / np.arange(1, chosen.sum() + 1))[::-1].cumprod()  # divided by those followed as long
    axis.step(duration[chosen][::-1], alive, where="post", label=f"{name}, by Kaplan and Meier")
    z = np.exp(log_shape) * (np.log(times) - constant - x[chosen] @ beta)
    axis.plot(times, np.exp(-np.exp(z)).mean(1), "k--", linewidth=1, label=None if treated else "Weibull")
axis.set(xlim=(0, 30), xlabel="time", ylabel="part without an event")
axis.legend()

# %%
# Time
# ----
#
# Evaluations of a millisecond or two are too short for workers, and each makes Cox's sums over all subjects.

for name, parallelize in (("Weibull", 1), ("Weibull", cores), ("Cox", 1), ("Cox", cores)):
    with optimizer(name, parallelize) as opt:
        opt.load(*models[name][1])
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"{name}, parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.2f} ms per evaluation")
pyplot.show()
