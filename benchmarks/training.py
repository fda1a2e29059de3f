"""What does `batchopt.training.fit` cost beside the steps that it makes?

Epochs over mini-batches by `fit` and by `opt.steps`, in turns, so that both see the machine as it is: 20 batches of 512
samples (`cnn`), on two workers. And, of a module that takes no time, in this process: what the loop does for each
batch itself, in time of the processor, which other programs change little.

    python -m benchmarks.training [--epochs 10]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import batchopt
from batchopt.training import fit
from benchmarks.findings import Finding, publish
from benchmarks.workloads import build

BATCH, BATCHES = 512, 20


def measure(
    opt: batchopt.BatchOptimizer, data: Any, size: int, epochs: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of `clock` a batch, of each epoch."""

    def by_steps() -> None:
        for _ in opt.steps(batchopt.Batches(data, size)):
            pass

    def by_fit() -> None:
        fit(opt, batchopt.Batches(data, size), epochs=1)

    ways = {"steps": by_steps, "fit": by_fit}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(epochs + 1):
        for name in sorted(ways, reverse=epoch % 2 == 0):  # each is the first one as often
            started = clock()
            ways[name]()
            if epoch:  # the first one warms up
                times[name].append((clock() - started) / -(-len(data[0]) // size))
    return times


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Cheap."""
    return torch.optim.SGD(parameters, lr=0.001)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    case = build("cnn")
    assert case.targets is not None
    copies = BATCH * BATCHES // len(case.inputs)
    data = case.inputs.repeat(copies, 1, 1, 1), case.targets.repeat(copies)
    with batchopt.BatchOptimizer(case.module, loss_fn=case.loss, parallelize=2, optimizer=sgd) as opt:
        whole = measure(opt, data, BATCH, given.epochs, time.perf_counter)
    small = torch.zeros(20000, 1), torch.zeros(20000, 1)
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss(), optimizer=sgd) as opt:
        alone = measure(opt, small, 10, given.epochs, time.process_time)
    ratio = statistics.median(a / b for a, b in zip(whole["fit"], whole["steps"], strict=True))
    step = statistics.median(whole["steps"])
    own = statistics.median(alone["fit"]) - statistics.median(alone["steps"])
    findings = [
        Finding(f"cnn: a step of {BATCH} samples", step * 1e3, "ms"),
        Finding("cnn: a batch of fit / a batch of steps", ratio, most=1.02),
        Finding("what fit does for a batch itself", own * 1e3, "ms"),
        Finding("  of a step of cnn", own / step, most=0.02),
    ]
    publish("training", findings, {"cnn": whole, "alone": alone})


if __name__ == "__main__":
    main()
