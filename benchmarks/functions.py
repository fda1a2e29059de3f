"""What do functions of the batch other than f cost: `predict`, `collect` and `total`?

- `predict` of each workload's inputs, which are loaded, in chunks of an eighth, on all cores: against torch on all
  cores under `no_grad` with the same chunks, in turn, each in a process of its own; and, in the same turns, an
  evaluation by both. `predict` is to gain at least as much as an evaluation does.
- `collect` of 100,000 rows of 100 numbers that are there already: against a copy of them into new memory.
- `total` of a matrix of 3,000 x 3,000 that is there already, once a worker: against what has to be done with so many
  numbers, a copy into memory that is there (each worker's sum) and `a + b` into new memory (the reduce).

    python -m benchmarks.functions [--workloads mlp cnn ...] [--parallelize 2] [--rounds 8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import benchmarks.arms as arms
from batchopt import BatchOptimizer
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build

CHUNKS = 8
ROWS, COLUMNS, SIDE = 100_000, 100, 3_000


class Plain:
    """Predictions by torch alone."""

    def __init__(self, workload: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._case = build(workload)
        self._case.module.eval()

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([self._case.module(chunk) for chunk in self._case.inputs.chunk(CHUNKS)])


class Ours:
    """Predictions by workers."""

    def __init__(self, workload: str, parallelize: int) -> None:
        case = build(workload)
        size = -(-len(case.inputs) // CHUNKS)
        self._opt = BatchOptimizer(
            case.module, loss_fn=case.loss, optimizer=None, parallelize=parallelize, chunk_size=size
        )
        self._opt.load(case.inputs, case.targets)
        self.close = self._opt.close

    def __call__(self) -> torch.Tensor:
        found: torch.Tensor = self._opt.predict()
        return found


def predictions(workload: str, parallelize: int, rounds: int) -> list[Finding]:
    """What `predict` gains, beside what an evaluation does."""
    ways = {
        "torch": arms.Arm(Plain, workload, parallelize),
        "ours": arms.Arm(Ours, workload, parallelize),
        "torch evaluates": arms.Arm(arms.Plain, workload, parallelize),
        "ours evaluates": arms.Arm(arms.Ours, workload, parallelize),
    }
    try:
        seconds = arms.take_turns(ways, rounds=rounds)
    finally:
        for way in ways.values():
            way.close()
    gain, aim = seconds["torch"] / seconds["ours"], seconds["torch evaluates"] / seconds["ours evaluates"]
    return [
        Finding(f"{workload}: predict by torch on all cores", 1e3 * seconds["torch"], "ms"),
        Finding(f"{workload}: predict", 1e3 * seconds["ours"], "ms"),
        Finding(f"{workload}: predict, times as fast as torch", gain),
        Finding(f"{workload}: an evaluation, times as fast as torch", aim),
        Finding(f"{workload}: predict / evaluation", gain / aim, least=1.0),
    ]


class Table(torch.nn.Module):
    """Constants that workers have, beside a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(1))
        self.values: torch.Tensor
        self.register_buffer("values", torch.randn(*shape))


def its_rows(module: torch.nn.Module, indices: torch.Tensor, targets: None) -> torch.Tensor:
    """Those of the samples, which are their indices: nothing is computed."""
    return module.get_buffer("values")[int(indices[0]) : int(indices[-1]) + 1]


def whole(module: torch.nn.Module, indices: torch.Tensor, targets: None) -> torch.Tensor:
    """The whole table, for each chunk."""
    return module.get_buffer("values")


def in_turn(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, way in ways.items():
            began = time.perf_counter()
            result = way()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
            del result
    return {name: statistics.median(found) for name, found in seconds.items()}


def results(parallelize: int, rounds: int) -> list[Finding]:
    """What it costs to bring results to the parent."""
    table, matrix = Table(ROWS, COLUMNS), Table(SIDE, SIDE)
    copy, there = matrix.values.clone(), torch.empty(SIDE, SIDE)
    with (
        BatchOptimizer(table, optimizer=None, parallelize=parallelize) as rows,
        BatchOptimizer(matrix, optimizer=None, parallelize=parallelize) as sums,
    ):
        ways: dict[str, Callable[[], object]] = {
            "new copy": table.values.clone,
            "collect": lambda: rows.collect(its_rows, torch.arange(ROWS)),
            "copy": lambda: there.copy_(matrix.values),
            "add": lambda: matrix.values + copy,
            "total": lambda: sums.total(whole, torch.arange(parallelize)),
        }
        seconds = in_turn(ways, rounds)
    return [
        Finding(f"a copy of {ROWS:,} x {COLUMNS} into new memory", 1e3 * seconds["new copy"], "ms"),
        Finding("collect of as many", 1e3 * seconds["collect"], "ms"),
        Finding("collect / copy", seconds["collect"] / seconds["new copy"], most=1.3),
        Finding(f"a copy of {SIDE:,} x {SIDE:,} into memory that is there", 1e3 * seconds["copy"], "ms"),
        Finding("a + b of as many into new memory", 1e3 * seconds["add"], "ms"),
        Finding("total of as many a worker", 1e3 * seconds["total"], "ms"),
        Finding("total / (copy + a + b)", seconds["total"] / (seconds["copy"] + seconds["add"]), most=1.2),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    findings = results(given.parallelize, 5 * given.rounds)
    for workload in given.workloads:
        findings += predictions(workload, given.parallelize, given.rounds)
    publish("functions", findings, {"parallelize": given.parallelize, "rounds": given.rounds})


if __name__ == "__main__":
    main()
