"""What does it cost to have the workers' program be the user's: to look whether anything has changed, and to send what
has?

A step of one evaluation on two workers, on a batch that stays: as it is; where an attribute is another one each time,
so that the program is pickled and sent anew; and, for scale, one evaluation. Three modules: one linear layer; 481
parts, as an interatomic potential has; 8.4 million parameters, and as many numbers that the loss function captured.

    python -m benchmarks.following [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt._program.program import snapshot_of
from batchopt_workers.evaluate.program import Program
from benchmarks.findings import Finding, publish


class Part(nn.Module):
    """Two layers, a norm, an activation, and a small constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.0)
        self.register_buffer("constant", torch.randn(3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.act(self.norm(self.second(self.first(x)))))
        return y


def mean_square(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss."""
    value: torch.Tensor = (module(x) - y).square().mean()
    return value


def capturing(numbers: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The loss, with many numbers beside."""
    return lambda module, x, y: mean_square(module, x, y) * numbers[0]


def cases() -> dict[str, tuple[nn.Module, Any, torch.Tensor, torch.Tensor]]:
    """Module, loss function, inputs and targets."""
    torch.manual_seed(0)
    parts = nn.Sequential(*(Part() for _ in range(80)))
    return {
        "one layer": (nn.Linear(1, 1), mean_square, torch.randn(2, 1), torch.randn(2, 1)),
        "481 parts": (parts, mean_square, torch.randn(8, 4), torch.randn(8, 4)),
        "8.4 million": (
            nn.Linear(4096, 2048, bias=False),
            capturing(torch.ones(4096 * 2048)),
            torch.randn(8, 4096),
            torch.randn(8, 2048),
        ),
    }


def milliseconds(function: Callable[[], object], rounds: int) -> float:
    """The median."""
    function()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def measure(name: str, rounds: int) -> list[Finding]:
    """All of one case."""
    module, loss_fn, x, y = cases()[name]
    looked = snapshot_of(Program(module, None, (loss_fn,), 0))
    numbers = iter(range(10**9))

    def changed() -> None:
        module.scale = float(next(numbers))  # type: ignore[assignment]
        opt.load(x, y)
        opt.evaluate()

    def same() -> None:
        opt.load(x, y)
        opt.evaluate()

    with BatchOptimizer(module, loss_fn=loss_fn, optimizer=None, parallelize=2, check_cut=False) as opt:
        opt.load(x, y)
        return [
            Finding(f"{name}: to look for changes", milliseconds(looked.holds, rounds), "ms"),
            Finding(f"{name}: an evaluation", milliseconds(opt.evaluate, rounds), "ms"),
            Finding(f"{name}: load and evaluate", milliseconds(same, rounds), "ms"),
            Finding(f"{name}: the same after a change", milliseconds(changed, rounds), "ms"),
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    publish("following", [finding for name in cases() for finding in measure(name, given.rounds)], {})


if __name__ == "__main__":
    main()
