"""
A large logistic regression beside scikit-learn
===============================================

40,000 samples of 40 features in ten classes, with the objective of scikit-learn's ``LogisticRegression(C=1)``. Both
libraries use L-BFGS, and come to the same minimum.
"""

import os
import time
import warnings

import torch
from matplotlib import pyplot
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

import batchopt

SAMPLES, FEATURES, CLASSES = 40_000, 40, 10
cores = len(os.sched_getaffinity(0))

torch.manual_seed(0)
x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64)
noise = torch.distributions.Gumbel(0.0, 3.0).sample((SAMPLES, CLASSES))
labels = (x @ torch.randn(FEATURES, CLASSES, dtype=torch.float64) + noise).argmax(1)

# %%
# batchopt
# --------
#
# scikit-learn minimises the sum of the losses plus half the sum of the squared weights. Divided by the number of
# samples, this is a mean, to which each chunk contributes the same penalty.


def objective(module, inputs, targets):
    penalty = 0.5 / SAMPLES * module.weight.square().sum()
    return torch.nn.functional.cross_entropy(module(inputs), targets) + penalty


def regression():
    module = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return module


def optimizer(parallelize, factory=None):
    return batchopt.BatchOptimizer(
        regression(), loss_fn=objective, optimizer=factory, parallelize=parallelize, threads_per_worker=1
    )


curve = []  # seconds and loss after each iteration


def lbfgs(parameters):
    return batchopt.LBFGS(parameters, max_iter=500, tolerance_grad=1e-9, tolerance_change=0.0, callback=note)


def note(iteration):
    curve.append((time.perf_counter() - began, iteration.f))


with optimizer(cores, lbfgs) as opt:
    opt.load(x, labels)
    opt.evaluate()  # starts the workers
    began = time.perf_counter()
    opt.step(x, labels)
    module, lowest = opt.module, opt.output
    result = opt.result
    print(f"{lowest:.8f} after {result.iterations} iterations, {curve[-1][0]:.2f} s: {result.status.value}")

# %%
# scikit-learn
# ------------
#
# A fit does not report its iterations, so it is made again with more and more of them.


def fit(iterations):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        began = time.perf_counter()
        found = LogisticRegression(max_iter=iterations, tol=1e-9).fit(x.numpy(), labels.numpy())
        return found, time.perf_counter() - began


peer = []
for iterations in (4, 8, 12, 16, 32):
    found, seconds = fit(iterations)
    other = regression()
    with torch.no_grad():
        other.weight.copy_(torch.from_numpy(found.coef_))
        other.bias.copy_(torch.from_numpy(found.intercept_))
        peer.append((seconds, objective(other, x, labels).item()))
    print(f"{iterations:4} iterations: {peer[-1][1]:.8f}, {seconds:.2f} s")

# %%
# The same weights
# ----------------
#
# Left: how far each is above the minimum, over time. scikit-learn evaluates this one function by hand-written code, and
# batchopt any function that torch can differentiate. Right: the weights agree. (An equal shift of the biases of all
# classes changes nothing, so they are not compared.)

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
minimum = min(lowest, *(loss for _, loss in peer)) - 1e-13
for label, points in {f"batchopt, {cores} workers": curve, "scikit-learn": peer}.items():
    seconds, losses = zip(*points, strict=True)
    left.semilogy(seconds, [loss - minimum for loss in losses], marker=".", label=label)
left.set(xlabel="seconds", ylabel="loss above the minimum")
left.legend()
right.plot(found.coef_.ravel(), module.weight.detach().ravel(), ".")
right.axline((0, 0), (1, 1), color="grey", linestyle=":")
right.set(xlabel="weight, scikit-learn", ylabel="weight, batchopt")
accuracy = (module(x).argmax(1) == labels).double().mean()
difference = abs(found.coef_ - module.weight.detach().numpy()).max()
print(f"accuracy {accuracy:.3f}; largest difference of weights {difference:.1e}")

# %%
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(x, labels)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.1f} ms per evaluation")
pyplot.show()
