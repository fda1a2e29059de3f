"""How much longer is an evaluation for each worker more, if the work itself takes the same time?

Each worker sleeps 20 ms in its forward, all at once; so the machine needs no cores for it, and what grows with the
number of workers is the asking, the answering and the putting together, and each worker's own few kernels, which all
want a core at the same moment. The slope of a line through the medians: of the whole, and of what this process
computes.

    python -m benchmarks.growth [--workers 2 4 8 16 32 64] [--repeats 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy
import torch

import batchopt
from benchmarks.findings import Finding, publish

NAP = 0.02


def sleeping(module: torch.nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
    """Work that needs no core."""
    time.sleep(NAP)
    loss: torch.Tensor = module(inputs).sum()
    return loss


def tiny(loss_fn: Callable[..., torch.Tensor], workers: int) -> batchopt.BatchOptimizer:
    """Of a model that takes no time, with so many workers in equal shares."""
    return batchopt.BatchOptimizer(
        torch.nn.Linear(1, 1),
        loss_fn=loss_fn,
        optimizer=None,
        parallelize=workers,
        reduction="sum",
        speeds=[1.0] * workers,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    seconds: dict[int, list[float]] = {count: [] for count in given.workers}
    own: dict[int, list[float]] = {count: [] for count in given.workers}
    with ExitStack() as stack:
        opts = {}
        for count in given.workers:
            opts[count] = opt = stack.enter_context(tiny(sleeping, count))
            opt.load(torch.ones(count, 1))
        for turn in range(given.repeats + 2):
            for count, opt in opts.items():
                started, before = time.perf_counter(), time.thread_time()
                opt.evaluate()
                if turn >= 2:
                    seconds[count].append(time.perf_counter() - started)
                    own[count].append(time.thread_time() - before)
    medians, owns = ({count: statistics.median(some) for count, some in all_.items()} for all_ in (seconds, own))
    slope, own_slope = (numpy.polyfit(list(found), list(found.values()), 1)[0] for found in (medians, owns))
    for count, median in medians.items():
        print(f"{count:3} workers: {(median - NAP) * 1e6:8.0f} us over the nap, {owns[count] * 1e6:8.0f} us here")
    ends = f"from {given.workers[0]} to {given.workers[-1]} workers, each"
    findings = [
        Finding(f"growth {ends}", slope * 1e6, "us", most=30),
        Finding("  of it in this process", own_slope * 1e6, "us"),
    ]
    publish("growth", findings, {"seconds": medians})


if __name__ == "__main__":
    main()
