"""What does a loop over mini-batches cost beside its evaluations?

A thousand steps of SGD over a DataLoader by `opt.steps`, against as many evaluations of a loaded batch of that size:
the next batch is read and copied to where the workers read it while they compute. Reading takes a core from a
worker; so what it costs depends on how many bytes a batch has for each second of computing: many (`mlp`), few (`cnn`).

    python -m benchmarks.minibatches [--steps 1000]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import batchopt
from benchmarks.findings import Finding, publish
from benchmarks.workloads import build

BATCH = {"cnn": 512, "mlp": 2048}


def measure(workload: str, steps: int) -> dict[str, float]:
    """Median seconds of an evaluation, of a step with reading ahead, and of one without."""
    case = build(workload)
    assert case.targets is not None
    whole, size = TensorDataset(case.inputs, case.targets), BATCH[workload]
    loader = DataLoader(whole, sampler=BatchSampler(SequentialSampler(whole), size, drop_last=True), batch_size=None)
    times: dict[str, list[float]] = {"evaluation": [], "step": [], "step without reading ahead": []}
    with batchopt.BatchOptimizer(
        case.module,
        loss_fn=case.loss,
        parallelize=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ) as opt:
        for inputs, targets in loader:
            opt.step(inputs, targets)
        for _ in range(0, steps, len(loader)):
            started = time.perf_counter()
            for _ in opt.steps(loader):
                pass
            times["step"].append((time.perf_counter() - started) / len(loader))
            started = time.perf_counter()
            for inputs, targets in loader:
                opt.step(inputs, targets)
            times["step without reading ahead"].append((time.perf_counter() - started) / len(loader))
            for _ in range(len(loader)):
                started = time.perf_counter()
                opt.evaluate()
                times["evaluation"].append(time.perf_counter() - started)
    return {name: statistics.median(some) for name, some in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    results = {workload: measure(workload, given.steps) for workload in BATCH}
    findings = []
    for workload, times in results.items():
        most = 1.05 if workload == "cnn" else None
        ratios = {name: seconds / times["evaluation"] for name, seconds in times.items()}
        findings += [
            Finding(f"{workload}: one evaluation of {BATCH[workload]} samples", times["evaluation"] * 1e3, "ms"),
            Finding(f"{workload}: a step of a loop over mini-batches / its evaluation", ratios["step"], most=most),
            Finding("  the same without reading ahead", ratios["step without reading ahead"]),
        ]
    publish("minibatches", findings, {"seconds": results})


if __name__ == "__main__":
    main()
