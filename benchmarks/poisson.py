"""How far does a network of ten thousand parameters come, beside SPRING, its paper's method for this?

Poisson's equation in five dimensions, 10,065 parameters in float64, with points drawn anew for each step: 750 of the
equation and 125 of the edge. SPRING is written in plain torch, for this problem: derivatives by a forward pass, rows of
the Jacobian by `torch.func`, the best of twelve lengths of a step, momentum 0.9, damping 0.01 (after 25 s 0.1 and 0.001
are as good, 1e-6 is not). After Guzman-Cordero, Dangel, Goldshlager and Zeinhofer, arXiv 2505.12149, 2025. The error is
that of 4,000 other points, relative, after so many seconds of one core; each run is a process of its own.

    python -m benchmarks.poisson [--seconds 240] [--seeds 3]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import batchopt
from benchmarks.findings import Finding, publish

INNER, EDGE, WEIGHT = 750, 125, 10.0
MOMENTUM, DAMPING, LENGTHS = 0.9, 0.01, [2.0**-k for k in range(-1, 11)]


def network(seed: int) -> nn.Sequential:
    """Four layers with tanh."""
    torch.manual_seed(seed)
    sizes, layers = (5, 64, 64, 48, 48, 1), list[nn.Module]()
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
        nn.init.xavier_normal_(layers[-2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(layers[-2].bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers[:-1])


def exact(x: Tensor) -> Tensor:
    """The solution."""
    return torch.cos(math.pi * x).sum(1)


def equation(module: Any, x: Tensor, _: None) -> Tensor:
    """The residual of the equation."""
    x = x.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slopes[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(5)]
    return torch.stack(second).sum(0) + math.pi**2 * exact(x)


def edge(module: Any, x: Tensor, _: None) -> Tensor:
    """The residual of the edge."""
    found: Tensor = module(x)[:, 0] - exact(x)
    return found


def draw() -> dict[str, Tensor]:
    """Points of the equation and of the edge."""
    at = torch.rand(EDGE, 5, dtype=torch.float64)
    at[torch.arange(EDGE), torch.randint(5, (EDGE,))] = torch.randint(2, (EDGE,)).double()
    return {"equation": torch.rand(INNER, 5, dtype=torch.float64), "edge": at}


def of_ours(make: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Sequential, float], None]:
    """Steps of an optimizer of ours."""

    def run(module: nn.Sequential, until: float) -> None:
        terms = {"equation": batchopt.Term(residual=equation), "edge": batchopt.Term(residual=edge, weight=WEIGHT)}
        with batchopt.BatchOptimizer(module, terms=terms, optimizer=make, chunk_size=INNER + EDGE) as opt:
            while time.process_time() < until:
                opt.step(draw())

    return run


def values(x: Tensor, layers: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The network with these parameters at points, and its Laplacian, by a forward pass."""
    start = torch.cat([torch.eye(5, dtype=x.dtype), torch.zeros(1, 5, dtype=x.dtype)]).expand(len(x), 6, 5)
    z = torch.cat([x[:, None], start], 1)  # the value, five derivatives and the Laplacian
    for i in range(0, len(layers), 2):
        z = z @ layers[i].T
        at, slopes, laplacian = z[:, 0] + layers[i + 1], z[:, 1:6], z[:, 6]
        if i + 2 == len(layers):
            break
        h = torch.tanh(at)
        d = 1 - h * h
        curved = d * laplacian - 2 * h * d * slopes.square().sum(1)
        z = torch.cat([h[:, None], d[:, None] * slopes, curved[:, None]], 1)
    return at[:, 0], laplacian[:, 0]


@torch.no_grad()
def spring(module: nn.Sequential, until: float) -> None:
    """SPRING in plain torch."""
    shapes = [p.shape for p in module.parameters()]

    def layers(x: Tensor) -> list[Tensor]:
        parts = torch.split(x, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def inner(x: Tensor, at: Tensor) -> Tensor:
        return (values(at, layers(x))[1] + math.pi**2 * exact(at)) / math.sqrt(INNER)

    def outer(x: Tensor, at: Tensor) -> Tensor:
        return (values(at, layers(x))[0] - exact(at)) * math.sqrt(WEIGHT / EDGE)

    rows = [vmap(grad(lambda x, at, f=f: f(x, at[None])[0]), (None, 0)) for f in (inner, outer)]
    x = nn.utils.parameters_to_vector(module.parameters())
    step, steps = torch.zeros_like(x), 0
    while time.process_time() < until:
        points = draw()
        one, two = points["equation"], points["edge"]
        jacobian = torch.cat([*(rows[0](x, part) for part in torch.split(one, 375)), rows[1](x, two)])
        r = torch.cat([inner(x, one), outer(x, two)]) - MOMENTUM * (jacobian @ step)
        gram = jacobian @ jacobian.T
        gram.diagonal().add_(DAMPING)
        found = torch.cholesky_solve(r[:, None], torch.linalg.cholesky(gram))[:, 0]
        step, steps = MOMENTUM * step + jacobian.T @ found, steps + 1
        ends = [x - length / math.sqrt(1 - MOMENTUM ** (2 * steps)) * step for length in LENGTHS]
        losses = [float(inner(end, one).square().sum() + outer(end, two).square().sum()) for end in ends]
        x = ends[losses.index(min(losses))]
    nn.utils.vector_to_parameters(x, module.parameters())


def levenberg_marquardt(params: Any) -> torch.optim.Optimizer:
    """A step for each draw."""
    return batchopt.LevenbergMarquardt(
        params, scaling="identity", geodesic=True, when_data_change="keep", max_iter=1, tolerance_change=0.0
    )


def lbfgs(params: Any) -> torch.optim.Optimizer:
    """Ten iterations for each draw."""
    return batchopt.LBFGS(params, history_size=100, max_iter=10, tolerance_change=0.0, tolerance_grad=0.0)


METHODS = {"LevenbergMarquardt": of_ours(levenberg_marquardt), "SPRING": spring, "LBFGS": of_ours(lbfgs)}


def error(method: str, seed: int, seconds: float) -> float:
    """The relative error of a run."""
    torch.set_num_threads(1)
    module = network(seed)
    METHODS[method](module, time.process_time() + seconds)
    at = torch.rand(4000, 5, dtype=torch.float64)
    with torch.no_grad():
        return float((module(at)[:, 0] - exact(at)).norm() / exact(at).norm())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    errors: dict[str, list[float]] = {}
    for method in METHODS:
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            errors[method] = [pool.submit(error, method, s, given.seconds).result() for s in range(given.seeds)]
    findings = [
        Finding(f"{method}: {name} error", of(found))
        for method, found in errors.items()
        for name, of in (("lowest", min), ("median", statistics.median), ("highest", max))
    ]
    publish("poisson", findings, {"errors": errors, "seconds": given.seconds})


if __name__ == "__main__":
    main()
