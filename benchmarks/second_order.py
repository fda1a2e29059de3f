"""Methods that are loops over the primitives, beside the optimizers that are kept: on Burgers' equation, in the same
time.

Natural gradients by `gram()`, with momentum and new points for each step (SPRING: Goldshlager, Abrahamsen and Lin,
"A Kaczmarz-inspired approach to accelerate the optimization of neural network wavefunctions", Journal of Computational
Physics 516, 2024; for such networks Guzman-Cordero and others, "Improving energy natural gradient descent through
Woodbury, momentum, and randomization", 2025). Newton's method by conjugate gradients over `hvp(V)`, preconditioned by
Nystroem's approximation of rank 60 (Rathore and others, "Challenges in training PINNs: a loss landscape perspective",
ICML 2024), after `SSBroyden` for a third of the time. Points are drawn as in `pinn.py`. And what a sketch of the
Jacobian could save at most of `normal()`: all but the rows.

    python -m benchmarks.second_order [--seconds 60] [--seed 100]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import batchopt
from batchopt._functions.least_squares import jacobian
from batchopt._machine.cores import usable_cores
from benchmarks import pinn
from benchmarks.curves import Curve
from benchmarks.findings import Finding, publish
from benchmarks.pinn_problems import BURGERS

SIZES = {"residual": 600, "initial": 125, "boundary": 50}  # of a step of natural gradients
DAMPING, MOMENTUM = 1e-3, 0.9
RANK, PRODUCTS, RENEWED = 60, 100, 20


class Run:
    """A network, its points and an optimizer of batchopt, if any, over all cores."""

    def __init__(self, seed: int, seconds: float, optimizer: Any = None) -> None:
        self.module, self.seed = BURGERS.network(seed), seed
        terms = {
            name: batchopt.Term(residual=part.residual, weight=part.weight) for name, part in BURGERS.parts.items()
        }
        self.opt = batchopt.BatchOptimizer(
            self.module, terms=terms, optimizer=optimizer, parallelize=usable_cores(), chunk_size=1850
        )
        self.curve = Curve(lambda: BURGERS.error(self.module), seconds)

    def searched(self, direction: Tensor, f: float) -> float:
        """Go along a direction, by the first of the steps 1, 1/2, 1/4, ... that lowers f enough; what f is there."""
        opt, x, step = self.opt, self.opt.parameters.clone(), 1.0
        while step > 1e-6:
            opt.parameters.copy_(x + step * direction)
            found = float(opt.evaluate())
            if found < f * (1 - 1e-4 * step):
                return found
            step /= 2
        opt.parameters.copy_(x)
        return f


def natural_gradient(seed: int, seconds: float) -> Curve:
    """SPRING."""
    run, before, number = Run(seed, seconds), None, 0
    opt = run.opt
    with opt:
        while not run.curve.over:
            number += 1
            parts = enumerate(BURGERS.parts.items())
            opt.load({name: part.draw(SIZES[name], 1000 * number + i) for i, (name, part) in parts})
            f, residuals = float(opt.evaluate()), opt.residuals()
            scale = torch.cat([torch.full((len(r),), len(r) ** -0.5, dtype=torch.float64) for r in residuals.values()])
            left = scale * _joined(residuals)
            if before is not None:
                left -= MOMENTUM * scale * _joined(opt.jvp(before))
            matrix = scale[:, None] * opt.gram() * scale
            matrix.diagonal().add_(DAMPING * float(matrix.diagonal().mean()) * min(1.0, f))
            found = scale * torch.cholesky_solve(left[:, None], torch.linalg.cholesky(matrix))[:, 0]
            sizes = [len(r) for r in residuals.values()]
            pieces = zip(residuals, torch.split(found, sizes), strict=True)
            step = opt.vjp({name: piece[:, None] for name, piece in pieces})
            before = step if before is None else step + MOMENTUM * before
            f = run.searched(-before, f)
            run.curve.look(opt.eval_counter, f)
    return run.curve


def _joined(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part[:, 0] for part in parts.values()])


def newton(seed: int, seconds: float) -> Curve:
    """Preconditioned Newton-CG, after SSBroyden."""

    def ssbroyden(params: Any) -> torch.optim.Optimizer:
        return pinn.ssbroyden(params, max_iter=50, max_eval=None, tolerance_grad=0.0, tolerance_change=0.0)

    run, number = Run(seed, seconds, ssbroyden), 0
    opt, generator = run.opt, torch.Generator().manual_seed(seed)
    with opt:
        points = pinn.points_of(BURGERS, pinn.DRAWN, seed)
        while run.curve.seconds < seconds / 3:
            opt.step(points)
            number += 1
            if number % 10 == 0:
                points = pinn.renewed(opt, BURGERS, points, 1000 + number)
        opt.load(points)
        f, number = float(opt.evaluate()), 0
        while not run.curve.over:
            if number % RENEWED == 0:
                precondition = nystroem(opt, generator, 1e-8)
            f = run.searched(_newton_direction(opt, precondition, 1e-8), f)
            number += 1
            run.curve.look(opt.eval_counter, f)
            if number % RENEWED == 0:
                points = pinn.renewed(opt, BURGERS, points, 5000 + number)
                opt.load(points)
                f = float(opt.evaluate())
    return run.curve


def nystroem(opt: batchopt.BatchOptimizer, generator: torch.Generator, damping: float) -> Callable[[Tensor], Tensor]:
    """A preconditioner of the damped Hessian, from its products with random vectors."""
    size = len(opt.parameters)
    tests = torch.linalg.qr(torch.randn(size, RANK, generator=generator, dtype=torch.float64)).Q
    products = opt.hvp(tests)
    inner = tests.T @ products
    lowest = float(torch.linalg.eigvalsh((inner + inner.T) / 2).min())
    shift = max(0.0, -lowest) + 1e-10 * float(torch.linalg.matrix_norm(products))
    products = products + shift * tests
    factor = torch.linalg.cholesky((tests.T @ products + products.T @ tests) / 2)
    vectors, values, _ = torch.linalg.svd(
        torch.linalg.solve_triangular(factor, products.T, upper=False).T, full_matrices=False
    )
    values = (values.square() - shift).clamp_min(0.0)

    def precondition(v: Tensor) -> Tensor:
        inside = vectors.T @ v
        least = float(values[-1]) + damping
        found: Tensor = vectors @ (least / (values + damping) * inside) + v - vectors @ inside
        return found

    return precondition


def _newton_direction(opt: batchopt.BatchOptimizer, precondition: Callable[[Tensor], Tensor], damping: float) -> Tensor:
    """By conjugate gradients, up to the first direction of negative curvature."""
    left = -torch.cat([parameter.grad.flatten() for parameter in opt.module.parameters() if parameter.grad is not None])
    found, enough = torch.zeros_like(left), 0.1 * float(left.norm())
    z = precondition(left)
    direction, product = z.clone(), float(left @ z)
    for number in range(PRODUCTS):
        curved = opt.hvp(direction) + damping * direction
        curvature = float(direction @ curved)
        if curvature <= 0:
            return z if number == 0 else found
        found += product / curvature * direction
        left -= product / curvature * curved
        if float(left.norm()) < enough:
            break
        z = precondition(left)
        product, last = float(left @ z), product
        direction = z + product / last * direction
    return found


def share_of_sum(seed: int) -> float:
    """The part of `normal()` that is more than to make the rows of the Jacobian and to gather them."""
    run, times = Run(seed, 1.0), {"normal": [0.0], "rows": [0.0]}
    with run.opt as opt:
        opt.load(pinn.points_of(BURGERS, pinn.DRAWN, seed))
        for _ in range(8):
            for name, work in (("normal", opt.normal), ("rows", lambda: jacobian(run.opt._engine))):
                began = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - began)
    return 1 - statistics.median(times["rows"][2:]) / statistics.median(times["normal"][2:])


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=100)
    given = parser.parse_args()
    curves = {
        "SSBroyden": pinn.run_ours(BURGERS, "SSBroyden + RAD", given.seed, given.seconds),
        "LM": pinn.run_ours(BURGERS, "LM + RAD", given.seed, given.seconds),
        "natural gradients": natural_gradient(given.seed, given.seconds),
        "Newton-CG": newton(given.seed, given.seconds),
    }
    findings = [Finding("normal(): what a sketch could save at most", share_of_sum(given.seed))]
    for name, curve in curves.items():
        _, evaluations, loss, error = curve.rows[-1]
        findings += [Finding(f"{name}: error after {given.seconds:g} s", error), Finding("  loss", loss)]
        findings.append(Finding("  evaluations", evaluations))
        assert math.isfinite(error)
    publish("second_order", findings, {name: curve.rows for name, curve in curves.items()})


if __name__ == "__main__":
    main()
