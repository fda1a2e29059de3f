"""
Burgers' equation: a physics-informed network and four optimizers
=================================================================

A network u(t, x) is to satisfy

.. math:: u_t + u u_x = 0.05 u_{xx}, \\qquad u(0, x) = -\\sin(\\pi x), \\qquad u(t, -1) = u(t, 1) = 0

for 0 < t < 1 and -1 < x < 1. There are no data: the loss is the mean square of what the equation leaves at collocation
points. The solution becomes steep at x = 0.
"""

import os
import time
from itertools import pairwise

import numpy as np
import torch
from matplotlib import pyplot

import batchopt

NU = 0.05


class Field(torch.nn.Module):
    """A network that has the right values at the start and at both ends, whatever its parameters are."""

    def __init__(self):
        super().__init__()
        widths, layers = (2, 16, 16, 1), []
        for inputs, outputs in pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
        self.net = torch.nn.Sequential(*layers[:-1]).double()

    def forward(self, points):
        t, x = points.T
        return t * (1 - x**2) * self.net(points)[:, 0] - torch.sin(torch.pi * x)


def residual(field, points, _):
    points = points.detach().requires_grad_()
    u = field(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)
    return first[:, 0] + u * first[:, 1] - NU * second[:, 1]


def drawn(count, seed):
    unit = torch.rand(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return unit * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])


# %%
# The exact solution
# ------------------
#
# The formula of Cole and Hopf, by Gauss-Hermite quadrature. It serves to measure errors, not to train.


def exact(points):
    t, x = (column[:, None] for column in points.numpy().T)
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x - np.sqrt(4 * NU * t) * nodes
    exponent = -np.cos(np.pi * y) / (2 * np.pi * NU)
    kernel = weights * np.exp(exponent - exponent.max(1, keepdims=True))
    return torch.from_numpy(-(np.sin(np.pi * y) * kernel).sum(1) / kernel.sum(1))


axes = torch.linspace(0, 1, 41, dtype=torch.float64), torch.linspace(-1, 1, 201, dtype=torch.float64)
grid = torch.cartesian_prod(*axes)
solution = exact(grid)


class Watch:
    """Errors over time. As a callback it stops an optimizer after so many evaluations."""

    def __init__(self, field, most):
        self.field, self.most, self.curve = field, most, []

    def start(self, opt):
        self.opt, self.began = opt, time.perf_counter()

    def __call__(self, iteration=None):
        now = time.perf_counter() - self.began
        if not self.curve or now > self.curve[-1][0] + 0.05:
            with torch.no_grad():
                error = (self.field(grid) - solution).norm() / solution.norm()
            self.curve.append((now, error.item()))
            self.began += time.perf_counter() - self.began - now  # looking takes no time
        return self.opt.eval_counter >= self.most


# %%
# Four optimizers
# ---------------
#
# Adam and L-BFGS keep their points. ``SSBroyden`` and ``LevenbergMarquardt`` get others now and then, drawn from 3,000
# candidates with probabilities that grow with the residual: ``batchopt.resample``. With ``when_data_change="keep"`` the
# curvature survives that. Evaluations are fixed; those of ``LevenbergMarquardt``, with the normal equations, take ten
# times as long.

cores = len(os.sched_getaffinity(0))
settings = {
    "Adam": (torch.optim.Adam, {"lr": 5e-3}, 1200, None),
    "LBFGS": (batchopt.LBFGS, {"max_iter": None}, 1200, None),
    "SSBroyden": (batchopt.SSBroyden, {"max_iter": 100, "when_data_change": "keep"}, 1200, 3000),
    "LevenbergMarquardt": (batchopt.LevenbergMarquardt, {"max_iter": 10, "when_data_change": "keep"}, 120, 3000),
}
curves, fields = {}, {}
for name, (kind, options, evaluations, candidates) in settings.items():
    torch.manual_seed(0)
    field = Field()
    watch = Watch(field, evaluations)
    if kind is not torch.optim.Adam:
        options["callback"] = watch
    points = drawn(400, seed=0)
    terms = {"equation": batchopt.Term(residual=residual)}
    with batchopt.BatchOptimizer(
        field,
        terms=terms,
        optimizer=lambda parameters, kind=kind, options=options: kind(parameters, **options),
        parallelize=cores,
        threads_per_worker=1,
    ) as opt:
        opt.load({"equation": points})
        opt.evaluate()  # starts the workers
        watch.start(opt)
        while not watch():
            loss = opt.step({"equation": points})
            if candidates:
                points = batchopt.resample(opt, "equation", drawn(candidates, opt.batch_counter), samples=400)
    curves[name], fields[name] = watch.curve, field
    print(f"{name:20} {opt.eval_counter:5} evaluations: loss {loss:.1e}, relative error {watch.curve[-1][1]:.1e}")

# %%
# Errors over time
# ----------------
#
# Left: the error relative to the exact solution. Adam lowers it least; methods that learn the curvature do better.
# Those whose points are resampled get furthest, although each resampling may raise the error for a while. Right:
# the solution with the smallest error, which is steep at x = 0.

figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
for name, curve in curves.items():
    left.semilogy(*zip(*curve, strict=True), label=name)
left.set(xlabel="seconds", ylabel="relative L2 error")
left.legend()
best = min(curves, key=lambda name: curves[name][-1][1])
with torch.no_grad():
    image = fields[best](grid).view(41, 201)
shown = right.imshow(image.T, origin="lower", aspect="auto", extent=(0, 1, -1, 1), cmap="RdBu_r")
right.set(xlabel="t", ylabel="x", title=f"u(t, x) by {best}")
figure.colorbar(shown, ax=right)

# %%
# Time
# ----
#
# For 10,000 points.

for parallelize in (1, cores):
    with batchopt.BatchOptimizer(
        Field(), residual=residual, optimizer=None, parallelize=parallelize, threads_per_worker=1
    ) as opt:
        opt.load(drawn(10_000, seed=0))
        opt.evaluate()  # starts the workers
        began = time.perf_counter()
        for _ in range(10):
            opt.evaluate()
        print(f"parallelize={parallelize}: {1e3 * (time.perf_counter() - began) / 10:.0f} ms per evaluation")
pyplot.show()
