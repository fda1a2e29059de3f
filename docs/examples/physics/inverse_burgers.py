"""
Two unknown coefficients of Burgers' equation
=============================================

A field u(t, x) was measured at 400 random places, with noise. It is known to satisfy

.. math:: u_t + a u u_x = \\nu u_{xx}, \\qquad u(0, x) = -\\sin(\\pi x), \\qquad u(t, -1) = u(t, 1) = 0

for 0 < t < 1 and -1 < x < 1. What are a and the viscosity? A network stands for the field, and both coefficients are
parameters beside its weights. Here the exact solution is known, so their values and standard errors can be compared
with those of a fit of it by SciPy.
"""

import os
import time

import numpy as np
import torch
from matplotlib import pyplot
from scipy import optimize

import batchopt

A, NU, NOISE = 1.0, 0.05, 0.02
NODES, WEIGHTS = np.polynomial.hermite.hermgauss(80)


def exact(a, nu, points):
    """The formula of Cole and Hopf, by Gauss-Hermite quadrature: a u satisfies Burgers' equation."""
    t, x = (column[:, None] for column in points.numpy().T)
    y = x - np.sqrt(4 * nu * t) * NODES
    exponent = -a * np.cos(np.pi * y) / (2 * np.pi * nu)
    kernel = WEIGHTS * np.exp(exponent - exponent.max(1, keepdims=True))
    return torch.from_numpy(-(np.sin(np.pi * y) * kernel).sum(1) / kernel.sum(1))


def drawn(count):
    return torch.rand(count, 2, dtype=torch.float64) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])


torch.manual_seed(0)
places, points = drawn(400), drawn(1500)
measured = exact(A, NU, places) + NOISE * torch.randn(400, dtype=torch.float64)

# %%
# A network, two coefficients and two terms
# -----------------------------------------
#
# The field has its initial and boundary values by construction, so two terms are left: the measurements, and the
# equation at 1,500 points. The logarithm keeps the viscosity positive. For standard errors each term is a sum of
# squares divided by a variance. That of the measurements is known; that of the equation is set further below.


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tanh, linear = torch.nn.Tanh(), torch.nn.Linear
        self.net = torch.nn.Sequential(linear(2, 12), tanh, linear(12, 12), tanh, linear(12, 1))
        self.a = torch.nn.Parameter(torch.tensor(0.5))
        self.log_nu = torch.nn.Parameter(torch.tensor(-1.0))
        self.double()

    def forward(self, points):
        t, x = points.T
        return t * (1 - x**2) * self.net(points)[:, 0] - torch.sin(torch.pi * x)


def equation(field, points, _):
    u = field(points.requires_grad_())
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)
    return first[:, 0] + field.a * u * first[:, 1] - field.log_nu.exp() * second[:, 1]


data = batchopt.Term(residual=lambda field, points, u: field(points) - u, reduction="sum")
terms = {"data": data, "equation": batchopt.Term(residual=equation, reduction="sum")}


def optimizer(parallelize):
    return batchopt.BatchOptimizer(
        Field(),
        terms=terms,
        optimizer=lambda params: batchopt.LevenbergMarquardt(params, scaling="identity", geodesic=True, max_iter=30),
        history={"a": lambda field: field.a, "nu": lambda field: field.log_nu.exp()},
        parallelize=parallelize,
        threads_per_worker=1,
    )


# %%
# Fit, with a smaller tolerance at each step
# ------------------------------------------
#
# The tolerance of the equation is the root mean square that its residuals are allowed, and it was chosen by making it
# smaller until the standard errors no longer changed. As long as they fall, the network may leave the equation to
# follow the noise, and this freedom is a part of the errors. ``of`` takes into account that the weights of the network
# are unknown, too. The fit of the exact solution, by SciPy, has two parameters and no network.

batch = {"data": (places, measured), "equation": points}
table = {}
with optimizer("auto") as opt:
    for tolerance in (0.1, 0.03, 0.01):
        opt.weights = {"data": 1 / NOISE**2, "equation": 1 / tolerance**2}
        opt.step(batch)
        found = opt.covariance(sigma=1.0).of(lambda field: torch.stack([field.a, field.log_nu.exp()]))
        table[f"tolerance {tolerance}"] = found.value.numpy(), found.error.numpy()
    rows, field = opt.history.rows, opt.module

best = optimize.least_squares(lambda x: (exact(*x, places) - measured) / NOISE, [0.8, 0.1])
table["SciPy"] = best.x, np.sqrt(np.diag(np.linalg.inv(best.jac.T @ best.jac)))
print(f"truth          a {A:.4f}, nu {NU:.5f}")
for name, (values, errors) in table.items():
    print(f"{name:14} a {values[0]:.4f} +- {errors[0]:.4f}, nu {values[1]:.5f} +- {errors[1]:.5f}")
others = drawn(2000)
with torch.no_grad():
    difference = field(others) - exact(A, NU, others)
print(f"relative error of the field {difference.norm() / exact(A, NU, others).norm():.1e}")

# %%
# Coefficients during the run
# ---------------------------
#
# Left: ``history`` recorded both coefficients after each iteration; the tolerance changed at the dotted lines. Right: a
# with its standard errors.

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
for name, true in {"a": A, "nu": NU}.items():
    left.plot([row[name] / true for row in rows], label=name)
for i in np.flatnonzero(np.diff([row["step"] for row in rows])):
    left.axvline(i + 0.5, color="grey", linestyle=":")
left.set(xlabel="iteration", ylabel="relative to the truth")
left.legend()
right.errorbar(list(table), *([numbers[i][0] for numbers in table.values()] for i in (0, 1)), fmt="o", capsize=4)
right.axhline(A, color="grey", linestyle=":", label="truth")
right.set(ylabel="a")
right.legend()

# %%
# Time
# ----

for parallelize in (1, len(os.sched_getaffinity(0))):
    with optimizer(parallelize) as opt:
        opt.load(batch)
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(50):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 50:.1f} ms per evaluation")
pyplot.show()
