"""What does `chunk_size` cost, against none?

For each workload, in one run and in turn: `parallelize=N` without a chunk size, and with each of several numbers of
chunks, all with one thread a worker. Prints the time of a chunk's own work in milliseconds, and the price: the median
time with chunks over that without, less 1.

    python -m benchmarks.chunks [--workloads mlp cnn ...] [--parallelize 2] [--chunks 2 8 32] [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

import batchopt
from benchmarks.findings import Finding, publish
from benchmarks.workloads import WORKLOADS, build


def interleave(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each way, all in turn, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(some) for name, some in times.items()}


def measure(name: str, parallelize: int, counts: list[int], repeats: int) -> dict[int, float]:
    """Median seconds for each number of chunks a worker; 0: no chunk size."""
    with ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {}
        for count in [0, *counts]:
            case = build(name)
            opt = batchopt.BatchOptimizer(
                case.module,
                loss_fn=case.loss,
                optimizer=None,
                parallelize=parallelize,
                threads_per_worker=1,
                chunk_size=-(-len(case.inputs) // (count * parallelize)) if count else None,
            )
            stack.enter_context(opt)
            opt.load(case.inputs, case.targets)
            ways[str(count)] = opt.evaluate
        return {int(count): seconds for count, seconds in interleave(ways, repeats).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 8, 32], help="chunks a worker")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    print(f"{'':8}{'chunks/worker':>14}{'ms each':>10}{'price':>9}")
    results = {}
    for name in given.workloads:
        results[name] = times = measure(name, given.parallelize, given.chunks, given.repeats)
        for count in given.chunks:
            price = times[count] / times[0] - 1
            print(f"{name:8}{count:14d}{times[count] / count * 1e3:10.2f}{price:9.1%}", flush=True)
    findings = [
        Finding(f"{name}: price of {count} chunks a worker", times[count] / times[0] - 1)
        for name, times in results.items()
        for count in given.chunks
    ]
    publish("chunks", findings, {"parallelize": given.parallelize, "seconds": results})


if __name__ == "__main__":
    main()
