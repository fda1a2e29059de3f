"""What does `compile` gain, on one core? An evaluation of f and its gradient, eager and compiled, whole and in pieces
that fit the cache; and by JAX, where it is installed.

    python -m benchmarks.compiled [--rounds 8] [--only NAME ...]

The ways take turns, each in a process with one thread. Aims: 2.0 (Burgers, 20,000 points, double precision), 1.6
(single precision), 2.2 (1,000 points), 1.8 (a potential with forces); and with `compile="auto"` nothing lost where
compiling gains nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from batchopt import BatchOptimizer
from benchmarks.arms import ROUNDS, Arm, take_turns
from benchmarks.findings import Finding, publish

D, S = torch.float64, torch.float32


class Case(NamedTuple):
    """A module, a loss that is a sum over samples, a batch, the samples of a piece that fits the cache, and the aim."""

    module: nn.Module
    loss: Callable[..., torch.Tensor]
    inputs: Any
    targets: Any
    piece: int
    aim: float


def layers(*widths: int) -> nn.Module:
    """A network with tanh."""
    found = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*found[:-1])


def burgers_loss(module: nn.Module, points: torch.Tensor, targets: Any) -> torch.Tensor:
    """Squares of the residual of Burgers' equation, u satisfying initial and boundary values."""
    points.requires_grad_()
    t, x = points.unbind(1)
    u = t * (1 - x**2) * module(points)[:, 0] - torch.sin(torch.pi * x)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)
    loss: torch.Tensor = (first[:, 0] + u * first[:, 1] - 0.02 * second[:, 1]).square().sum()
    return loss


def burgers(points: int, dtype: torch.dtype, aim: float) -> Case:
    """3 layers of 40."""
    low, size = torch.tensor([[0.0, -1.0], [1.0, 2.0]], dtype=dtype)
    where = torch.rand(points, 2, dtype=dtype) * size + low
    return Case(layers(2, 40, 40, 40, 1).to(dtype), burgers_loss, where, None, 2500, aim)


def potential_loss(
    module: nn.Module, positions: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Squares of the errors of energies and forces."""
    energies, forces = targets
    positions.requires_grad_()
    i, j = torch.triu_indices(positions.shape[1], positions.shape[1], 1, device=positions.device)
    r = (positions[:, i] - positions[:, j]).square().sum(2).sqrt()
    centers = torch.linspace(0, 4, 16, dtype=r.dtype, device=r.device)
    basis = torch.exp(-4 * (r[..., None] - centers).square())
    energy = (module(basis)[..., 0] * torch.exp(-r)).sum(1)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    loss: torch.Tensor = (energy - energies).square().sum() + (slope + forces).square().sum()
    return loss


def potential() -> Case:
    """64 configurations of 16 atoms."""
    targets = torch.randn(64, dtype=D), torch.randn(64, 16, 3, dtype=D)
    return Case(layers(16, 32, 32, 1).double(), potential_loss, torch.randn(64, 16, 3, dtype=D), targets, 16, 1.8)


def crossed(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(module(x), y, reduction="sum")


def classifier() -> Case:
    """A plain network, which compiling does not help."""
    batch = torch.randn(1024, 784), torch.randint(0, 10, (1024,))
    return Case(layers(784, 256, 10), crossed, *batch, 256, 0.0)


def convolutional() -> Case:
    """Two convolutions, which compiling does not help."""
    module = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 10)),
    )
    return Case(module, crossed, torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,)), 32, 0.0)


CASES: dict[str, Callable[[], Case]] = {
    "burgers, 20,000, f64": lambda: burgers(20_000, D, 2.0),
    "burgers, 20,000, f32": lambda: burgers(20_000, S, 1.6),
    "burgers, 1,000, f64": lambda: burgers(1_000, D, 2.2),
    "potential, f64": potential,
    "mlp": classifier,
    "cnn": convolutional,
}
# Of which an aim is that nothing is lost, since nothing can be gained.
PLAIN = "mlp", "cnn"


class Ours:
    """An evaluation by this library, in this process; with pieces of the case's size, or whole."""

    def __init__(self, name: str, compile: bool | Literal["auto"], pieces: bool) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        case = CASES[name]()
        size = case.piece if pieces else None
        options: dict[str, Any] = {"loss_fn": case.loss, "reduction": "sum", "optimizer": None, "check_cut": False}
        self._opt = BatchOptimizer(case.module, **options, chunk_size=size, compile=compile, threads_per_worker=1)
        self._opt.load(case.inputs, case.targets)
        until = time.monotonic() + 120
        while compile and time.monotonic() < until:  # until it has decided, and the comparisons are rare
            self._opt.evaluate()
            if self._opt.eval_counter > 64 and "while it is compiled" not in repr(self._opt):
                break
        self.said = repr(self._opt)

    def __call__(self) -> float:
        return self._opt.evaluate().item()

    def close(self) -> None:
        """End it."""
        self._opt.close()


class Jax:
    """Burgers' equation by JAX: derivatives by forward mode, jitted, the gradient by reverse mode."""

    def __init__(self, name: str) -> None:
        if hasattr(os, "sched_setaffinity"):  # it has a thread for each core otherwise
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        jax: Any = importlib.import_module("jax")
        jax.config.update("jax_enable_x64", True)
        np: Any = importlib.import_module("jax.numpy")
        torch.manual_seed(0)
        case = CASES[name]()
        weights = [np.array(parameter.detach().numpy()) for parameter in case.module.parameters()]
        points = np.array(case.inputs.numpy())

        def u(weights: Any, point: Any) -> Any:
            h = point
            for weight, bias in zip(weights[::2], weights[1::2], strict=True):
                h = weight @ h + bias
                h = np.tanh(h) if bias is not weights[-1] else h
            return point[0] * (1 - point[1] ** 2) * h[0] - np.sin(np.pi * point[1])

        def residual(weights: Any, point: Any) -> Any:
            t, x = np.array([1.0, 0.0], point.dtype), np.array([0.0, 1.0], point.dtype)
            along = lambda p: jax.jvp(lambda q: u(weights, q), (p,), (x,))  # noqa: E731
            (value, slope), (_, second) = jax.jvp(along, (point,), (x,))
            rate = jax.jvp(lambda q: u(weights, q), (point,), (t,))[1]
            return rate + value * slope - 0.02 * second

        loss = lambda weights: (jax.vmap(lambda p: residual(weights, p))(points) ** 2).sum()  # noqa: E731
        both = jax.jit(jax.value_and_grad(loss))
        self._run: Callable[[], object] = lambda: jax.block_until_ready(both(weights))

    def __call__(self) -> object:
        return self._run()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="*", default=[*CASES], help=", ".join(CASES))
    given = parser.parse_args()
    findings, seconds = [], {}
    for name in given.only:
        arms = {
            "eager": Arm(Ours, name, False, False),
            "compiled": Arm(Ours, name, True, False),
            "compiled, pieces": Arm(Ours, name, True, True),
            "auto": Arm(Ours, name, "auto", False),
        }
        if "burgers" in name and importlib.util.find_spec("jax") is not None:
            arms["jax"] = Arm(Jax, name)
        seconds[name] = times = take_turns(arms, rounds=given.rounds)
        aim = CASES[name]().aim or None
        gains = {way: times["eager"] / times[way] for way in arms if way not in ("eager", "jax")}
        findings.append(Finding(f"{name}: an eager evaluation", times["eager"] * 1e3, "ms"))
        best = max(gains["compiled"], gains["compiled, pieces"])
        findings += [Finding(f"{name}: eager / {way}", gain) for way, gain in gains.items() if way != "auto"]
        findings.append(Finding(f"{name}: eager / the faster of both", best, least=aim))
        findings.append(Finding(f"{name}: eager / auto", gains["auto"], least=0.98 if name in PLAIN else None))
        if "jax" in times:
            ratio = times["jax"] / times["eager"] * best
            findings.append(Finding(f"{name}: jax / the faster of both", ratio, least=1.1))
    publish("compiled", findings, {"seconds": seconds})


if __name__ == "__main__":
    main()
