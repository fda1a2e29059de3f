"""What do the normal equations cost, and their products, beside torch in one process on all cores?

Burgers' residual at 10,000 points, a network of 8 layers of 20 (3,021 parameters), float64:

- `normal()` on two workers, against the same matrix by `torch.func` in one process on all cores (`vmap` of `jacrev`, in
  blocks of the size that is fastest here, and `J.T @ J`), in turn;
- `gauss_newton(v)`, against an evaluation of f and df/dX by the same workers;
- what a step of Levenberg-Marquardt does beside: the factorisation and the solution;
- `normal()` of a small problem (41 parameters, 301 samples) in this process on one thread, against the same matrix by
  `torch.func`, and what each chunk more takes.

    python -m benchmarks.least_squares [--parallelize 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.func import functional_call, jacrev, jvp, vmap

from batchopt import BatchOptimizer, Term
from batchopt.optim.quadratic import DenseModel
from benchmarks.findings import Finding, publish

POINTS, BLOCKS = 10_000, (125, 250, 500, 1250)
NU = 0.01 / math.pi


def network() -> torch.nn.Module:
    """8 hidden layers of 20."""
    torch.manual_seed(0)
    widths = [2, *[20] * 8, 1]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).double()


def by_autograd(module: Any, at: torch.Tensor, _: None) -> torch.Tensor:
    """The residual as it is mostly written."""
    at = at.detach().requires_grad_()
    u = module(at)
    (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), at, create_graph=True)
    residual: torch.Tensor = first[:, :1] + u * first[:, 1:] - NU * second[:, 1:]
    return residual


def by_func(module: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """The same as torch.func can differentiate it."""
    along_t, along_x = torch.zeros_like(at), torch.zeros_like(at)
    along_t[:, 0], along_x[:, 1] = 1.0, 1.0
    differentiate: Any = jvp
    u, slope = differentiate(module, (at,), (along_t,))
    first, second = differentiate(lambda z: differentiate(module, (z,), (along_x,))[1], (at,), (along_x,))
    residual: torch.Tensor = slope + u * first - NU * second
    return residual


class Serial:
    """The matrix by torch.func, on all cores."""

    def __init__(self, module: torch.nn.Module, at: torch.Tensor) -> None:
        self._at, self._module = at, module
        self._parameters = {name: p.detach() for name, p in module.named_parameters()}
        self._rows = vmap(jacrev(self._one), (None, 0))
        timed = {block: self._time(block) for block in BLOCKS}
        self._block = min(timed, key=lambda block: timed[block])

    def _one(self, parameters: dict[str, torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        return by_func(lambda z: functional_call(self._module, parameters, (z,)), at[None])[0]

    def _time(self, block: int) -> float:
        self._sum(self._at[: 4 * block], block)
        began = time.perf_counter()
        self._sum(self._at[: 4 * block], block)
        return (time.perf_counter() - began) / (4 * block)

    def _sum(self, at: torch.Tensor, block: int) -> torch.Tensor:
        size = sum(p.numel() for p in self._parameters.values())
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for points in at.split(block):  # type: ignore[no-untyped-call]
            found = self._rows(self._parameters, points)
            rows = torch.cat([found[name].reshape(len(points), -1) for name in self._parameters], 1)
            matrix.addmm_(rows.T, rows)
        return matrix / len(at)

    def __call__(self) -> torch.Tensor:
        return self._sum(self._at, self._block)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    began = time.perf_counter()
    found = function()
    return time.perf_counter() - began, found


def small(rounds: int) -> dict[str, float]:
    """Median seconds, of a regression: the matrix by torch.func; `normal()` in one chunk, and for each chunk more."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = torch.nn.Sequential(torch.nn.Linear(2, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1)).double()
    x = torch.rand(301, 2, dtype=torch.float64)
    y = torch.sin(3 * x.sum(1, keepdim=True))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    rows = vmap(jacrev(lambda own, x, y: functional_call(module, own, (x[None],))[0] - y), (None, 0, 0))

    def by_torch() -> torch.Tensor:
        found = rows(parameters, x, y)
        jacobian = torch.cat([found[name].reshape(len(x), -1) for name in parameters], 1)
        return jacobian.T @ jacobian / len(x)

    options: dict[str, Any] = {"optimizer": None, "threads_per_worker": 1}
    with (
        BatchOptimizer(module, torch.nn.MSELoss(), **options) as whole,
        BatchOptimizer(module, torch.nn.MSELoss(), chunk_size=50, **options) as cut,
    ):
        ways: dict[str, Callable[[], Any]] = {"torch": by_torch, "one": whole.normal, "seven": cut.normal}
        for opt in (whole, cut):
            opt.load(x, y)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(20 * rounds):
            for name, way in ways.items():
                seconds[name].append(timed(way)[0])
    found = {name: statistics.median(some) for name, some in seconds.items()}
    return {**found, "more": (found["seven"] - found["one"]) / 6}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallelize", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    at = torch.rand(POINTS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    module = network()
    serial = Serial(module, at)
    seconds: dict[str, list[float]] = {name: [] for name in ("serial", "normal", "evaluation", "product", "solve")}
    terms = {"equation": Term(residual=by_autograd)}
    with BatchOptimizer(module, terms=terms, optimizer=None, parallelize=given.parallelize) as opt:
        opt.load({"equation": (at,)})
        v = torch.ones_like(opt.parameters)
        normal = opt.normal()
        for _ in range(given.rounds):
            opt.evaluate()
            took, matrix = timed(serial)
            seconds["serial"].append(took)
            took, normal = timed(opt.normal)
            seconds["normal"].append(took)
            torch.testing.assert_close(normal.matrix, matrix, rtol=1e-8, atol=1e-10)
            opt.evaluate()
            seconds["evaluation"].append(timed(opt.evaluate)[0])
            seconds["product"].append(timed(lambda: opt.gauss_newton(v))[0])
            began = time.perf_counter()
            DenseModel(normal.vector, normal.matrix, None, each=False).solve(normal.vector, 1e-3)
            seconds["solve"].append(time.perf_counter() - began)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    gain = statistics.median(a / b for a, b in zip(seconds["serial"], seconds["normal"], strict=True))
    products = statistics.median(a / b for a, b in zip(seconds["product"], seconds["evaluation"], strict=True))
    findings = [
        Finding("the matrix by torch.func in one process, all cores", middle["serial"] * 1e3, "ms"),
        Finding(f"normal() on {given.parallelize} workers", middle["normal"] * 1e3, "ms"),
        Finding("times as fast", gain, least=1.6),
        Finding("an evaluation of f and df/dX", middle["evaluation"] * 1e3, "ms"),
        Finding("gauss_newton(v)", middle["product"] * 1e3, "ms"),
        Finding("product / evaluation", products, most=3.0),
        Finding("a step of Levenberg-Marquardt beside these: factorisation and solution", middle["solve"] * 1e3, "ms"),
    ]
    little = small(given.rounds)
    findings += [
        Finding("41 parameters, 301 samples: normal() in one chunk", little["one"] * 1e3, "ms"),
        Finding("the same / the matrix by torch.func", little["one"] / little["torch"], most=2.0),
        Finding("each chunk more", little["more"] * 1e3, "ms", most=0.5),
    ]
    publish("least_squares", findings, {"seconds": seconds, "small": little})


if __name__ == "__main__":
    main()
