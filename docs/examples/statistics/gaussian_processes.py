"""
Gaussian processes, many at once
================================

Each of 24 stations measures a quantity at 200 times. Each has a process with its own amplitude, length scale and noise,
which maximise the exact marginal likelihood. One evaluation of one process is a Cholesky decomposition of 200 by 200:
too short to share. So the *stations* are the samples, and the workers share those.
"""

import math
import os
import time

import torch
from matplotlib import pyplot

import batchopt

STATIONS, TIMES = 24, 200


def covariance(one, other, amplitude, length):
    """Squared exponential, for several stations: (stations, times of one, times of other)."""
    distance = (one[:, :, None] - other[:, None, :]) / length[:, None, None]
    return amplitude[:, None, None] ** 2 * torch.exp(-0.5 * distance**2)


class Processes(torch.nn.Module):
    """Logarithms of amplitude, length scale and noise of each station."""

    def __init__(self):
        super().__init__()
        self.logarithms = torch.nn.Parameter(torch.zeros(STATIONS, 3, dtype=torch.float64))

    def factor(self, stations, times):
        """The Cholesky factors of the covariances of what was measured."""
        amplitude, length, noise = self.logarithms[stations].exp().T
        noises = (noise**2 + 1e-8)[:, None, None] * torch.eye(times.shape[1], dtype=times.dtype)
        return torch.linalg.cholesky(covariance(times, times, amplitude, length) + noises)

    def forward(self, inputs):
        """The negative logarithm of the marginal likelihood of each station, per measurement."""
        stations, times, values = inputs
        factor = self.factor(stations, times)
        white = torch.linalg.solve_triangular(factor, values[:, :, None], upper=False)[:, :, 0]
        determinant = factor.diagonal(dim1=1, dim2=2).log().sum(1)
        return (0.5 * white.square().sum(1) + determinant) / times.shape[1] + 0.5 * math.log(2 * math.pi)


# %%
# Data that are draws of such processes
# -------------------------------------

torch.manual_seed(0)
spread = torch.tensor([[0.5, 2.0], [0.2, 1.5], [0.05, 0.5]], dtype=torch.float64).log()
true = Processes()
true.logarithms.data = spread[:, 0] + torch.rand(STATIONS, 3, dtype=torch.float64) * (spread[:, 1] - spread[:, 0])
stations = torch.arange(STATIONS)
times = (10 * torch.rand(STATIONS, TIMES, dtype=torch.float64)).sort(1).values
with torch.no_grad():
    values = (true.factor(stations, times) @ torch.randn(STATIONS, TIMES, 1, dtype=torch.float64))[:, :, 0]

# %%
# Fit
# ---
#
# The module returns a value per sample; ``loss_fn`` takes their mean. A trial of the line search whose matrix is not
# positive definite is an infinite loss, from which the search steps back: ``on_nonfinite`` says so.

cores = len(os.sched_getaffinity(0))
data = stations, times, values


def evidence(module, inputs, _):
    return module(inputs).mean()


def lbfgs(parameters):
    return batchopt.LBFGS(parameters, max_iter=60, tolerance_grad=1e-6)


def optimizer(parallelize):
    return batchopt.BatchOptimizer(
        Processes(),
        loss_fn=evidence,
        optimizer=lbfgs,
        parallelize=parallelize,
        threads_per_worker=1,
        on_nonfinite=torch.linalg.LinAlgError,
    )


with optimizer(cores) as opt:
    opt.step(data)
    fitted = opt.module
    at_truth = evidence(true, data, None)
    print(opt.result.status.value)
    print(f"negative log likelihood per measurement {opt.output:.4f}, with the true numbers {at_truth:.4f}")

# %%
# What was found
# --------------
#
# Left: three stations, with the mean of the fitted process and twice its standard deviation. Right: the fitted numbers
# of all stations against the true ones. Noise and length scales are found well. Amplitudes scatter: a record of ten
# units holds only some ten length scales, so there are few independent observations of them.


def posterior(module, station, line):
    """Mean and standard deviation of the process itself, without noise."""
    at = station[None]
    amplitude, length, _ = module.logarithms[at].exp().T
    factor = module.factor(at, times[at])
    cross = covariance(times[at], line[None], amplitude, length)
    white = torch.linalg.solve_triangular(factor, torch.cat((cross, values[at][:, :, None]), 2), upper=False)[0]
    mean = white[:, :-1].T @ white[:, -1]
    return mean, (amplitude**2 - white[:, :-1].square().sum(0)).clamp(min=0).sqrt()


figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
line = torch.linspace(0, 10, 300, dtype=torch.float64)
with torch.no_grad():
    for row, station in enumerate(stations[:3]):
        mean, deviation = posterior(fitted, station, line)
        shift = -5.0 * row
        left.scatter(times[station], values[station] + shift, s=3, color="0.6")
        left.plot(line, mean + shift, color=f"C{row}")
        left.fill_between(line, mean - 2 * deviation + shift, mean + 2 * deviation + shift, color=f"C{row}", alpha=0.3)
    left.set(xlabel="time", ylabel="three stations, each 5 lower", yticks=[])
    for column, name in enumerate(("amplitude", "length scale", "noise")):
        right.loglog(true.logarithms[:, column].exp(), fitted.logarithms[:, column].exp(), "o", ms=4, label=name)
    right.axline((0.1, 0.1), (1, 1), color="grey", linestyle=":")
right.set(xlabel="true", ylabel="fitted")
right.legend()

# %%
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(data)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(10):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 10:.0f} ms per evaluation")
pyplot.show()
