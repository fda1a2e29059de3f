"""How much memory does a batch of one gigabyte take with four workers, and how much does a worker take?

The growth of the proportional set size of the parent and all that it started, from before `load` to after an
evaluation; the user's own copy of the batch is there before. And what a worker has for itself alone (unique set size)
after an evaluation, less its gradient row.

    python -m benchmarks.memory [--gigabytes 1] [--workers 4]
"""

from __future__ import annotations

import argparse

import psutil
import torch

import batchopt
from benchmarks.findings import Finding, publish

FEATURES = 1000


def in_all() -> float:
    """Proportional set size of this process and all that it started, in bytes."""
    me = psutil.Process()
    return float(sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    samples = int(given.gigabytes * 1e9 / 4 / FEATURES)
    inputs, targets = torch.ones(samples, FEATURES), torch.ones(samples, 1)
    module = torch.nn.Linear(FEATURES, 1)
    with batchopt.BatchOptimizer(module, torch.nn.MSELoss(), optimizer=None, parallelize=given.workers) as opt:
        opt.load(inputs[:16], targets[:16])
        opt.evaluate()
        before = in_all()
        opt.load(inputs, targets)
        opt.evaluate()
        grown = (in_all() - before) / (4.0 * inputs.numel() + 4.0 * targets.numel())
        own = max(psutil.Process(worker.pid).memory_full_info().uss for worker in opt.workers) / 1e6
    findings = [
        Finding(f"growth for a batch of {given.gigabytes:g} GB, {given.workers} workers / the batch", grown, most=1.05),
        Finding("what a worker has for itself", own, "MB"),
    ]
    publish("memory", findings, {})


if __name__ == "__main__":
    main()
