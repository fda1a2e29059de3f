"""
Optimal control to an exact end point
=====================================

The oscillator of Van der Pol, pushed by a force u that has bounds, is to come to rest at time 6:

.. math:: x_1' = x_2, \\qquad x_2' = (1 - x_1^2) x_2 - x_1 + u, \\qquad |u| \\le 1, \\qquad x(6) = 0

Which force does it at the least integral of :math:`x_1^2 + x_2^2 + u^2`? Each sample is an initial state, and has a
plan of its own: 24 values of u. Bounds belong to the optimizer; the end point is a constraint for each sample, by the
augmented Lagrangian method.
"""

import os
import time

import numpy as np
import torch
from matplotlib import pyplot
from scipy import optimize
from torch.autograd.functional import jacobian

import batchopt

END, PIECES, LIMIT, WEIGHT = 6.0, 24, 1.0, 100.0
DT = END / PIECES
angles = torch.linspace(0, 5 / 6 * torch.pi, 6, dtype=torch.float64)
STATES = 1.2 * torch.stack([angles.cos(), angles.sin()], 1)


def slope(x, u):
    return torch.stack([x[:, 1], (1 - x[:, 0] ** 2) * x[:, 1] - x[:, 0] + u], 1)


def simulated(controls, x):
    """States at all times by the classical method of Runge and Kutta, u constant within a step: (plans, times, 2)."""
    states = [x]
    for u in controls.T:
        first = slope(x, u)
        second = slope(x + DT / 2 * first, u)
        third = slope(x + DT / 2 * second, u)
        x = x + DT / 6 * (first + 2 * second + 2 * third + slope(x + DT * third, u))
        states.append(x)
    return torch.stack(states, 1)


# %%
# A cost, and a constraint for each sample
# ----------------------------------------
#
# Both terms are sums of squares: ``parts`` has the roots of the integrand at the end of each step. The targets of the
# second term are the shift of the augmented Lagrangian method, a row for each sample.


class Plans(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.controls = torch.nn.Parameter(torch.zeros(len(STATES), PIECES, dtype=torch.float64))

    def forward(self, samples):
        controls = self.controls[samples]
        return controls, simulated(controls, STATES[samples])


def parts(controls, states):
    return DT**0.5 * torch.cat([states[:, 1:].flatten(1), controls], 1)


def cost(plans, samples, _):
    return parts(*plans(samples))


def end(plans, samples, shift):
    return plans(samples)[1][:, -1] + shift


terms = {"cost": batchopt.Term(residual=cost, reduction="sum")}
terms["end"] = batchopt.Term(residual=end, reduction="sum", weight=WEIGHT)


def optimizer(parallelize):
    return batchopt.BatchOptimizer(
        Plans(),
        terms=terms,
        optimizer=lambda params: batchopt.LevenbergMarquardt(params, bounds=[(-LIMIT, LIMIT)]),
        parallelize=parallelize,
        threads_per_worker=1,
    )


# %%
# Minimise, add what is missed to the shift, repeat
# -------------------------------------------------
#
# Each round misses less, with the same weight. If the bounds do not let a state come to rest, what it misses stays from
# round to round, and its shift grows.

samples, shift = torch.arange(len(STATES)), torch.zeros_like(STATES)
with optimizer("auto") as opt:
    for step in range(5):
        opt.step({"cost": samples, "end": (samples, shift)})
        with torch.no_grad():
            controls, states = opt.module(samples)
        missed = states[:, -1]
        shift = shift + missed
        print(f"round {step}: {opt.result.iterations} iterations, end missed by {missed.abs().max():.1e}")
    print(f"{opt.result.active[0].sum()} of {controls.numel()} controls are at a bound")

# %%
# One plan by SciPy
# -----------------
#
# SLSQP takes the bounds and the constraint as they are, for one initial state at a time: here the second.


def for_scipy(function):
    """A function of a plan, and its derivatives."""
    return lambda u: function(torch.from_numpy(u)).numpy(), lambda u: jacobian(function, torch.from_numpy(u)).numpy()


f, gradient = for_scipy(lambda u: parts(u[None], simulated(u[None], STATES[1:2])).square().sum())
bounds, options = [(-LIMIT, LIMIT)] * PIECES, {"ftol": 1e-13, "maxiter": 300}
last, slopes = for_scipy(lambda u: simulated(u[None], STATES[1:2])[0, -1])
meet = {"type": "eq", "fun": last, "jac": slopes}
theirs = optimize.minimize(f, np.zeros(PIECES), (), "SLSQP", gradient, bounds=bounds, constraints=meet, options=options)
print(f"cost {parts(controls, states)[1].square().sum():.9f}, by SLSQP {theirs.fun:.9f} ({theirs.message})")
print(f"largest difference of a control {np.abs(controls[1].numpy() - theirs.x).max():.0e}")

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
for path, plan in zip(states, controls, strict=True):
    left.plot(*path.T, marker=".")
    right.stairs(plan, np.linspace(0, END, PIECES + 1), baseline=None)
left.set(xlabel="$x_1$", ylabel="$x_2$", title="paths to rest")
right.set(xlabel="time", ylabel="u", title="plans within bounds")

# %%
# Time
# ----
#
# A simulation is a chain of small operations, which takes as long for 96 initial states as for six.

for parallelize in (1, len(os.sched_getaffinity(0))):
    with optimizer(parallelize) as opt:
        opt.load({"cost": samples, "end": (samples, shift)})
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.1f} ms per evaluation")
pyplot.show()
