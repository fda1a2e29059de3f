"""
An inverse problem with bounds
==============================

How well does a rod conduct heat at each place? 500 experiments heat it at random places; 25 sensors measure the
steady temperatures, with noise. The conductivity is a parameter at each of 120 places, and has to stay between known
bounds. SciPy's L-BFGS-B handles bounds; the workers evaluate f and its gradient.
"""

import os
import time

import torch
from matplotlib import pyplot
from scipy import optimize

import batchopt

CELLS, EXPERIMENTS = 119, 500
NOISE = 0.04
LOW, HIGH = 0.5, 4.0


class Rod(torch.nn.Module):
    """From sources of heat, shape (experiments, cells), to temperatures at every fifth cell; the ends are at 0."""

    def __init__(self):
        super().__init__()
        self.conductivity = torch.nn.Parameter(torch.ones(CELLS + 1, dtype=torch.float64))  # between cells

    def forward(self, sources):
        k = self.conductivity
        matrix = torch.diag(k[:-1] + k[1:]) - torch.diag(k[1:-1], 1) - torch.diag(k[1:-1], -1)
        temperatures = torch.linalg.solve(matrix, sources.T / CELLS**2).T
        return temperatures[:, 2::5]


def objective(module, sources, measured):
    """The mean square of the misfit, in units of the noise, and a small penalty for roughness."""
    misfit = ((module(sources) - measured) / NOISE).square().mean()
    return misfit + 1e-4 * module.conductivity.diff().square().sum()


torch.manual_seed(0)
place = torch.linspace(0, 1, CELLS, dtype=torch.float64)
heated = torch.rand(EXPERIMENTS, 2, 1, dtype=torch.float64)
sources = 10 * torch.exp(-(((place - heated) / 0.05) ** 2)).sum(1)
between = torch.linspace(0, 1, CELLS + 1, dtype=torch.float64)
true = Rod()
with torch.no_grad():
    true.conductivity[(between > 0.25) & (between < 0.45)] = HIGH
    true.conductivity[(between > 0.65) & (between < 0.8)] = LOW
    measured = true(sources)
measured += NOISE * torch.randn_like(measured)

# %%
# With and without bounds
# -----------------------
#
# ``opt.objective()`` is f over a flat NumPy vector, which any solver can use. The same solver runs once with bounds and
# once without.

cores = len(os.sched_getaffinity(0))
found, curves = {}, {}
with batchopt.BatchOptimizer(Rod(), loss_fn=objective, optimizer=None, parallelize=cores, threads_per_worker=1) as opt:
    opt.load(sources, measured)
    f = opt.objective()
    for name, bounds in {"with bounds": [(LOW, HIGH)] * len(f.x0), "without": None}.items():
        curve = curves[name] = []
        result = optimize.minimize(
            f.value_and_grad,
            f.x0,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 150},
            callback=lambda x, curve=curve: curve.append(f(x)),  # no evaluation: the last point is kept
        )
        found[name] = result.x
        error = abs(result.x - true.conductivity.detach().numpy()).mean()
        print(
            f"{name:12} f {result.fun:.4f} after {result.nfev} evaluations; mean error of the conductivity {error:.3f}"
        )

# %%
# What bounds are worth
# ---------------------
#
# Left: f is the same for both, and falls to the noise level: the measurements fit both alike. Right: without bounds the
# noise makes the conductivity swing to unphysical values, most where the rod conducts well, since temperatures hardly
# depend on how well. The bounds exclude that.

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
for name, curve in curves.items():
    left.semilogx(range(1, len(curve) + 1), curve, label=name)
    right.step(between, found[name], where="mid", label=name)
left.axhline(1.0, color="grey", linestyle=":", label="noise")
left.set(xlabel="iteration", ylabel="f")
left.legend()
right.step(between, true.conductivity.detach(), where="mid", color="black", linestyle="--", label="true")
for bound in (LOW, HIGH):
    right.axhline(bound, color="grey", linewidth=0.5)
right.set(xlabel="place", ylabel="conductivity", ylim=(0, 7))
right.legend()

# %%
# Time
# ----
#
# An evaluation of a few milliseconds leaves workers little to gain; it takes longer with more experiments.

for parallelize in (1, cores):
    with batchopt.BatchOptimizer(
        Rod(), loss_fn=objective, optimizer=None, parallelize=parallelize, threads_per_worker=1
    ) as opt:
        opt.load(sources, measured)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.1f} ms per evaluation")
pyplot.show()
