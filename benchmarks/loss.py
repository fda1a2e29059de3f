"""What does it cost to have f as a tensor with a graph: `opt.loss().backward()`, beside `opt.evaluate()`?

For each workload, in turn by the same workers with the same shares: two optimizers would share out the batch by speeds
that each has measured for itself, which differ by more than what is asked. `evaluate` overwrites the gradients,
`backward` adds to them, so they are set to None before, as by `zero_grad()`, which is timed too.

    python -m benchmarks.loss [--workloads mlp cnn ...] [--parallelize 2] [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from batchopt import BatchOptimizer
from benchmarks.arms import BURST
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build


def burst(way: Callable[[], object]) -> list[float]:
    """The seconds of some runs in a row, less the first: it finds what the other way has left."""
    seconds = []
    for _ in range(BURST):
        began = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def measure(workload: str, parallelize: int, rounds: int) -> dict[str, float]:
    """The median seconds of each way."""
    case = build(workload)

    def with_graph() -> None:
        case.module.zero_grad()
        opt.loss().backward()  # type: ignore[no-untyped-call]

    with BatchOptimizer(case.module, loss_fn=case.loss, optimizer=None, parallelize=parallelize) as opt:
        opt.load(case.inputs, case.targets)
        ways: dict[str, Callable[[], object]] = {"evaluate": opt.evaluate, "loss": with_graph}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + rounds):
            for name, way in ways.items():
                seconds[name] += burst(way)
    return {name: statistics.median(found[BURST - 1 :]) for name, found in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    findings, seconds = [], {}
    for name in given.workloads:
        seconds[name] = times = measure(name, given.parallelize, given.rounds)
        findings += [
            Finding(f"{name}: an evaluation", 1e3 * times["evaluate"], "ms"),
            Finding(f"{name}: loss().backward() / evaluate()", times["loss"] / times["evaluate"], most=1.05),
        ]
    publish("loss", findings, {"parallelize": given.parallelize, "rounds": given.rounds, "seconds": seconds})


if __name__ == "__main__":
    main()
