"""How long does one evaluation of f and df/dX take, against plain torch in one process?

For each workload, in one run and in turn: plain torch on one thread, plain torch on all cores, and `parallelize=N`
with and without `chunk_size`. Prints the median of each in milliseconds, and the speed of `parallelize=N` as ratios:
`efficiency` is (one thread / N) / ours, `all cores` is all cores / ours; both are better when larger.

    python -m benchmarks.evaluation [--workloads mlp cnn ...] [--parallelize 2] [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

import batchopt
from benchmarks.workloads import WORKLOADS, Workload, build

CHUNKS = 16  # with `chunk_size`: this many chunks


def plain(case: Workload, threads: int) -> Callable[[], None]:
    """One evaluation by torch alone, in this process."""
    parameters = list(case.module.parameters())

    def evaluate() -> None:
        torch.set_num_threads(threads)
        for parameter in parameters:
            parameter.grad = None
        case.loss(case.module, case.inputs, case.targets).backward()  # type: ignore[no-untyped-call]

    return evaluate


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


def measure(name: str, parallelize: int, repeats: int) -> dict[str, float]:
    """The medians for one workload, in seconds."""
    cores = torch.get_num_threads()
    # "all cores" first: its idle threads spin for a while, and would take the cores of whoever comes next and needs
    # both
    ways: dict[str, Callable[[], object]] = {
        "all cores": plain(build(name), cores),
        "one thread": plain(build(name), 1),
    }
    with ExitStack() as stack:
        case = build(name)
        for label, chunk_size in (("ours", None), ("ours, chunks", -(-len(case.inputs) // CHUNKS))):
            case = build(name)
            opt = batchopt.BatchOptimizer(
                case.module, loss_fn=case.loss, optimizer=None, parallelize=parallelize, chunk_size=chunk_size
            )
            stack.enter_context(opt)
            opt.load(case.inputs, case.targets)
            ways[label] = opt.evaluate
        medians = interleave(ways, repeats)
    torch.set_num_threads(cores)
    return medians


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--parallelize", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = {name: measure(name, given.parallelize, given.repeats) for name in given.workloads}
    header = ["one thread", "all cores", "ours", "ours, chunks"]
    print(f"{'ms':8}" + "".join(f"{column:>14}" for column in [*header, "efficiency", "all cores /"]))
    efficiencies, speedups = [], []
    for name, times in results.items():
        efficiencies.append(times["one thread"] / given.parallelize / times["ours"])
        speedups.append(times["all cores"] / times["ours"])
        row = "".join(f"{times[column] * 1e3:14.2f}" for column in header)
        print(f"{name:8}{row}{efficiencies[-1]:14.2f}{speedups[-1]:14.2f}")
    mean = statistics.geometric_mean
    print(f"{'geometric mean':64}{mean(efficiencies):14.2f}{mean(speedups):14.2f}")
    if given.json:
        given.json.write_text(json.dumps({"parallelize": given.parallelize, "seconds": results}, indent=2))


if __name__ == "__main__":
    main()
