"""
Calibrating a simulator
=======================

An epidemic in eight towns, by SciPy's solver of differential equations: there is no gradient, and parameters have
bounds. ``finite_differences`` makes the simulator a module like any other; the towns are the samples that workers
share. Several starts show whether the minimum is the only one, and the errors of the fit come with it.
"""

import os
import time

import numpy as np
import torch
from matplotlib import pyplot
from scipy.integrate import solve_ivp

import batchopt

DAYS = np.linspace(0, 60, 31)
NAMES = ["transmission", "recovery", "reported"]
LOW, HIGH = torch.tensor([0.05, 0.02, 0.05]), torch.tensor([1.5, 1.0, 1.0])


class Epidemic(torch.nn.Module):
    """Reported cases over time, as parts of each town, which begins with some infected."""

    def __init__(self):
        super().__init__()
        for name, value in zip(NAMES, (0.8, 0.3, 0.7), strict=True):
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)))

    @batchopt.finite_differences(method="3-point")
    def forward(self, infected):
        rate, recovery, reported = self.transmission.item(), self.recovery.item(), self.reported.item()

        def slope(_, y):
            return [-rate * y[0] * y[1], rate * y[0] * y[1] - recovery * y[1]]

        runs = [
            solve_ivp(slope, (0, 60), [1 - i, i], t_eval=DAYS, method="LSODA", rtol=1e-9, atol=1e-11)
            for i in infected.tolist()
        ]
        return torch.from_numpy(np.stack([reported * run.y[1] for run in runs]))


# %%
# What was reported
# -----------------

generator = torch.Generator().manual_seed(0)
infected = torch.logspace(-4, -2, 8, dtype=torch.float64)
true = Epidemic()
with torch.no_grad():
    for name, value in zip(NAMES, (0.45, 0.15, 0.4), strict=True):
        getattr(true, name).fill_(value)
    exact = true(infected)
cases = exact + 0.004 * torch.randn(exact.shape, dtype=torch.float64, generator=generator)

# %%
# Fit, from several starts within the bounds
# ------------------------------------------

cores = len(os.sched_getaffinity(0))


def lm(parameters):
    return batchopt.LevenbergMarquardt(parameters, bounds=list(zip(LOW, HIGH, strict=True)))


def optimizer(parallelize):
    return batchopt.BatchOptimizer(
        Epidemic(), torch.nn.MSELoss(), optimizer=lm, parallelize=parallelize, threads_per_worker=1, chunk_size=1
    )


starts = LOW + (HIGH - LOW) * torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(16)
with optimizer(cores) as opt:
    opt.load(infected, cases)
    found = opt.multistart(starts, keep=4)
    print(found)
    errors = opt.covariance()
    fitted = opt.predict()
print(errors.summary())

# %%
# Towns, and starts
# -----------------

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
for town in (0, 3, 7):
    (line,) = left.plot(DAYS, fitted[town], label=f"{infected[town]:.2%} infected at first")
    left.plot(DAYS, cases[town], ".", color=line.get_color())
left.set(xlabel="day", ylabel="reported cases, part of the town")
left.legend()
kept = [run for run in found.runs if run.minimum is not None]
right.semilogy([run.at_start for run in found.runs], [run.f for run in found.runs], "x", color="grey", label="start")
right.semilogy([run.at_start for run in kept], [run.f for run in kept], "o", label="end of a run")
right.set(xlabel="f at the start", ylabel="f")
right.legend()

# %%
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(infected, cases)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for shift in range(5):
            opt.parameters[0] = 0.5 + 0.01 * shift
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 5:.0f} ms per gradient")
pyplot.show()
