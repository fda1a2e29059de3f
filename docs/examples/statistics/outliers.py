"""
Least squares with outliers
===========================

A damped oscillation is measured 5,000 times. A fifth of the measurements are far too large. The square of a residual
lets a few outliers decide the fit; a robust loss grows more slowly, and limits their influence.
"""

import os
import time

import torch
from matplotlib import pyplot

import batchopt

TRUE = torch.tensor([2.0, 0.4, 3.0, 0.5], dtype=torch.float64)  # height, decay, frequency, phase
NOISE, SAMPLES = 0.1, 5_000


def measured(fraction, seed=0):
    """Times and values, of which a fraction are outliers."""
    random = torch.Generator().manual_seed(seed)
    times = 5 * torch.rand(SAMPLES, generator=random, dtype=torch.float64)
    values = Oscillation(TRUE)(times) + NOISE * torch.randn(SAMPLES, generator=random, dtype=torch.float64)
    wrong = torch.rand(SAMPLES, generator=random) < fraction
    return times, (values + wrong * (1 + 4 * torch.rand(SAMPLES, generator=random))).detach()


class Oscillation(torch.nn.Module):
    """Four numbers, which are to be found."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = torch.nn.Parameter(numbers.clone())

    def forward(self, times):
        height, decay, frequency, phase = self.numbers
        return height * torch.exp(-decay * times) * torch.cos(frequency * times + phase)


def misfit(module, times, values):
    return module(times) - values


# %%
# A loss per residual
# -------------------
#
# ``Term(residual=..., loss=..., scale=...)`` has the losses of SciPy's ``least_squares``. Residuals much larger than
# ``scale`` count as outliers: here it is the standard deviation of the noise. Robust losses, ``cauchy`` above all, may
# have several minima: they start where least squares ended.

START = torch.tensor([1.0, 0.1, 2.7, 0.0], dtype=torch.float64)
LOSSES = ("linear", "huber", "soft_l1", "cauchy")


def fitted(loss, start, times, values):
    terms = {"signal": batchopt.Term(residual=misfit, loss=loss, scale=NOISE)}
    with batchopt.BatchOptimizer(Oscillation(start), terms=terms, optimizer="lm", parallelize="auto") as opt:
        opt.step({"signal": (times, values)})
        return opt.parameters.clone(), opt.result


def fit_all(times, values):
    fits = {}
    for loss in LOSSES:
        fits[loss] = fitted(loss, fits["linear"][0] if fits else START, times, values)
    return fits


times, values = measured(0.2)
fits = fit_all(times, values)
print(f"{'loss':10}{'height':>9}{'decay':>9}{'frequency':>11}{'phase':>9}{'iterations':>12}")
print(f"{'(true)':10}{TRUE[0]:9.3f}{TRUE[1]:9.3f}{TRUE[2]:11.3f}{TRUE[3]:9.3f}")
for loss, (found, result) in fits.items():
    print(f"{loss:10}{found[0]:9.3f}{found[1]:9.3f}{found[2]:11.3f}{found[3]:9.3f}{result.iterations:12}")

# %%
# How many outliers are too many?
# -------------------------------
#
# Left: least squares are drawn towards the outliers, which all lie above the signal; ``cauchy`` stays on it. Right: the
# error grows with the fraction of outliers for all but ``cauchy``, since ``huber`` and ``soft_l1`` still give each
# outlier a constant pull, and here all of them pull in one direction.

fractions = (0.0, 0.1, 0.2, 0.4)
errors = {loss: [] for loss in LOSSES}
for fraction in fractions:
    for loss, (found, _) in fit_all(*measured(fraction, seed=1)).items():
        errors[loss].append((found - TRUE).norm())

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
line = torch.linspace(0, 5, 300, dtype=torch.float64)
left.scatter(times[:1500], values[:1500], s=2, color="0.6", label="measured (1,500 of them)")
left.plot(line, Oscillation(TRUE)(line).detach(), color="black", linestyle="--", label="true")
for loss in LOSSES:
    left.plot(line, Oscillation(fits[loss][0])(line).detach(), label=loss)
    right.semilogy(fractions, errors[loss], marker="o", label=loss)
left.set(xlabel="time", ylabel="signal", title="a fifth are outliers")
right.set(xlabel="fraction of outliers", ylabel="error of the four numbers")
left.set_ylim(top=9)
left.legend(fontsize="small", ncols=3)
right.legend(fontsize="small")

# %%
# Time
# ----
#
# One iteration needs the matrix of the normal equations, here four by four, and one evaluation. For 5,000 measurements
# and four numbers this is too little work for workers, so the fits above had ``parallelize="auto"``, which stays in
# this process then. 200,000 measurements are more to share:

times, values = (part.repeat(40) for part in (times, values))
cores = len(os.sched_getaffinity(0))
for parallelize in (1, cores):
    terms = {"signal": batchopt.Term(residual=misfit, loss="cauchy", scale=NOISE)}
    with batchopt.BatchOptimizer(
        Oscillation(START), terms=terms, optimizer=None, parallelize=parallelize, threads_per_worker=1
    ) as opt:
        opt.load({"signal": (times, values)})
        opt.normal()  # starts the workers
        began = time.perf_counter()
        for _ in range(5):
            opt.normal()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 5:.0f} ms per normal equations")
pyplot.show()
