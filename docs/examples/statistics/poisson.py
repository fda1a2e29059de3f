"""
Poisson regression, with errors
===============================

Claims per policy, of 200,000 policies with 30 properties each: the logarithm of the expected number is linear in the
properties, and policies differ in the time that they were insured. L-BFGS finds the maximum of the likelihood in some
twenty evaluations, and the workers make its second derivatives, too: standard errors by the likelihood, and by the
sandwich, which is right also if the counts scatter more than Poisson's.
"""

import os
import time

import torch
from matplotlib import pyplot

import batchopt

POLICIES, PROPERTIES = 200_000, 30

# %%
# Data whose counts scatter too much
# ----------------------------------
#
# Each policy has a risk of its own beside its properties, with mean 1 and variance 1/2.

torch.manual_seed(0)
properties = torch.randn(POLICIES, PROPERTIES, dtype=torch.float64)
years = 0.1 + 0.9 * torch.rand(POLICIES, 1, dtype=torch.float64)
true = 0.2 * torch.randn(PROPERTIES, dtype=torch.float64)
risk = torch.distributions.Gamma(2.0, 2.0).sample((POLICIES,))
counts = torch.poisson(years[:, 0] * risk * torch.exp(properties @ true - 1.0))[:, None]

# %%
# Fit
# ---
#
# The logarithm of the years insured is an offset: a column whose weight is 1. The criterion is the mean negative
# logarithm of the likelihood, without what does not depend on the weights.

cores = len(os.sched_getaffinity(0))


class Claims(torch.nn.Module):
    """The logarithm of the expected number of claims."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(PROPERTIES, dtype=torch.float64))
        self.constant = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        properties, years = inputs
        return (properties @ self.weight + self.constant)[:, None] + years.log()


def optimizer(parallelize):
    return batchopt.BatchOptimizer(
        Claims(), torch.nn.PoissonNLLLoss(), optimizer="lbfgs", parallelize=parallelize, threads_per_worker=1
    )


data = properties, years
with optimizer(cores) as opt:
    opt.step(data, counts)
    print(f"negative log likelihood {opt.output:.6f} after {opt.result.evaluations} evaluations")
    likelihood = opt.covariance()
    sandwich = opt.covariance("sandwich")
    estimates = opt.module.weight.detach().clone()
print("\n".join(str(sandwich.summary()).splitlines()[:12]))

# %%
# Which errors are right
# ----------------------
#
# The counts scatter more than the likelihood believes, so its errors are too small. The mean square of the distances to
# the true weights, in standard errors, should be 1, give or take a quarter for thirty of them.

for name, found in {"likelihood": likelihood, "sandwich": sandwich}.items():
    distances = (estimates - true) / found.errors[:PROPERTIES]
    print(f"{name}: standard errors {found.errors[:PROPERTIES].mean():.4f}, {distances.square().mean():.2f}")
figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
axis.errorbar(range(PROPERTIES), estimates - true, sandwich.errors[:PROPERTIES], fmt=".", capsize=3, label="sandwich")
axis.errorbar(
    [i + 0.3 for i in range(PROPERTIES)],
    estimates - true,
    likelihood.errors[:PROPERTIES],
    fmt=".",
    capsize=3,
    label="likelihood",
)
axis.axhline(0, color="grey", linestyle=":")
axis.set(xlabel="property", ylabel="estimate minus truth")
axis.legend()

# %%
# Time
# ----

for parallelize in (1, cores):
    with optimizer(parallelize) as opt:
        opt.load(data, counts)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(20):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 20:.1f} ms per evaluation")
pyplot.show()
