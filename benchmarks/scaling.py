"""How much faster are more workers, and how many are worth having?

An evaluation of 50, 200 and 1,000 ms of work is shared out among 2 to 64 workers, which sleep in place of it, so that
a machine of few cores can show it. What is left over the work is fitted by `fixed + a N`, and so is what this process
computes: the first is what this machine would take with more workers, whose own few kernels compete for its cores; with
the second, and what one worker takes beside its work, it is what a machine with a core for each would.

    python -m benchmarks.scaling [--workers 2 4 8 16 32 64] [--repeats 12]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from contextlib import ExitStack

import numpy
import torch

import batchopt
from benchmarks.findings import Finding, publish

WORK = (0.05, 0.2, 1.0)
PREDICTED = (128, 256, 512, 1024)


class Sleep:
    """A loss that takes its time, and needs no core for it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, module: torch.nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
        time.sleep(self.seconds)
        loss: torch.Tensor = module(inputs).sum()
        return loss


def tiny(loss_fn: Sleep, workers: int) -> batchopt.BatchOptimizer:
    """Of a model that takes no time, with so many workers in equal shares."""
    return batchopt.BatchOptimizer(
        torch.nn.Linear(1, 1),
        loss_fn=loss_fn,
        optimizer=None,
        parallelize=workers,
        reduction="sum",
        speeds=[1.0] * workers,
    )


class Line:
    """`fixed + a N`."""

    def __init__(self, over: dict[int, float]) -> None:
        """Fitted to the seconds of so many workers."""
        self.a, self.fixed = (float(number) for number in numpy.polyfit(list(over), list(over.values()), 1))

    def efficiency(self, work: float, workers: int, beside: float = 0.0) -> float:
        """Of so many workers for that work, each of which takes something beside it."""
        return work / workers / (work / workers + beside + max(self.fixed, 0.0) + self.a * workers)


def measure(workers: list[int], repeats: int) -> tuple[dict[float, dict[int, float]], dict[int, float]]:
    """The seconds of an evaluation of each amount of work, and the least that this process computes in one, by the
    number of workers."""
    seconds: dict[float, dict[int, float]] = {work: {} for work in WORK}
    own: dict[int, float] = {}
    with ExitStack() as stack:
        for count in workers:
            sleep = Sleep()
            opt = stack.enter_context(tiny(sleep, count))
            for work in WORK:
                sleep.seconds = work / count
                opt.load(torch.ones(count, 1))
                whole, here = [], []
                for turn in range(repeats + 2):
                    started, before = time.perf_counter(), time.thread_time()
                    opt.evaluate()
                    if turn >= 2:
                        whole.append(time.perf_counter() - started)
                        here.append(time.thread_time() - before)
                seconds[work][count] = statistics.median(whole)
                own[count] = min(own.get(count, math.inf), statistics.median(here))
    return seconds, own


def beside_work(repeats: int) -> float:
    """The seconds of an evaluation in this process without any work: what a worker takes beside it, or less."""
    with tiny(Sleep(), 1) as opt:
        opt.load(torch.ones(1, 1))
        taken = []
        for _ in range(10 * repeats):
            started = time.perf_counter()
            opt.evaluate()
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Measure and predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    beside = beside_work(given.repeats)
    seconds, own_seconds = measure(given.workers, given.repeats)
    over = {n: statistics.median(seconds[work][n] - work / n for work in WORK) for n in given.workers}
    here, own = Line(over), Line(own_seconds)
    findings = []
    for work, found in seconds.items():
        name = f"{work * 1e3:g} ms of work"
        for count, took in found.items():
            findings.append(Finding(f"{name}, {count} workers: efficiency", work / count / took))
        for count in PREDICTED:
            findings.append(Finding(f"{name}, {count} workers with a core each", own.efficiency(work, count, beside)))
    findings += [
        Finding("this machine: fixed", here.fixed * 1e6, "us"),
        Finding("this machine: for each worker", here.a * 1e6, "us"),
        Finding("this process: fixed", own.fixed * 1e6, "us"),
        Finding("this process: for each worker", own.a * 1e6, "us", most=12),
    ]
    publish("scaling", findings, {"seconds": seconds, "own": own_seconds, "beside": beside})


if __name__ == "__main__":
    main()
