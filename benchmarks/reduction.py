"""How long does it take to put the gradients of two workers together, against adding two vectors?

8.4 million parameters. The reduce of an evaluation by two workers, against a plain `a + b -> c` of that size with all
cores, in turn in one process.

    python -m benchmarks.reduction [--parameters 8400000] [--repeats 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

import batchopt
from batchopt._mapreduce.answers import Answer
from benchmarks.findings import Finding, publish


class Vector(torch.nn.Module):
    """Nothing but parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = torch.nn.Parameter(torch.zeros(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.vector * inputs.sum()


class Timed(batchopt.BatchOptimizer):
    """Keeps how long the last reduce took."""

    seconds = 0.0

    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """As ever."""
        started = time.perf_counter()
        loss = super().reduce(answers)
        self.seconds = time.perf_counter() - started
        return loss


def total(output: torch.Tensor) -> torch.Tensor:
    """The criterion."""
    return output.sum()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=8_400_000)
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    a, b, c = (torch.ones(given.parameters) for _ in range(3))
    plain, ours = [], []
    with Timed(Vector(given.parameters), total, optimizer=None, parallelize=2, reduction="sum") as opt:
        opt.load(torch.ones(2, 1))
        for turn in range(given.repeats + 3):
            opt.evaluate()
            started = time.perf_counter()
            torch.add(a, b, out=c)
            if turn >= 3:
                plain.append(time.perf_counter() - started)
                ours.append(opt.seconds)
    sums = {"plain": statistics.median(plain), "ours": statistics.median(ours)}
    findings = [
        Finding(f"reduce, {given.parameters:,} parameters, two workers", sums["ours"] * 1e3, "ms"),
        Finding("a + b -> c with all cores", sums["plain"] * 1e3, "ms"),
        Finding("reduce / (a + b -> c)", sums["ours"] / sums["plain"], most=1.3),
    ]
    publish("reduction", findings, {"seconds": sums})


if __name__ == "__main__":
    main()
