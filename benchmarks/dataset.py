"""How much memory does a full-batch evaluation of a dataset of four gigabytes take, of which nobody holds more than a
chunk?

The samples are computed when they are read. One evaluation of f and df/dX over all of them, with `cache=False`: the
growth of the parent's peak resident set from before `load` to after the evaluation, and the largest resident set of a
worker less that of one which has evaluated a few samples. The seconds are those of reading more than of evaluating.

    python -m benchmarks.dataset [--gigabytes 4] [--workers 2]
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import psutil
import torch

import batchopt
from batchopt import Worker
from benchmarks.findings import Finding, publish

FEATURES = 4000
CHUNK = 1000


class Made(torch.utils.data.Dataset[Any]):
    """Samples that are a function of their index: `FEATURES` numbers of single precision, and one target."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((FEATURES,), index / self.samples), torch.ones(1)


def peak() -> float:
    """Of the resident set of this process so far, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peaks(opt: batchopt.BatchOptimizer) -> float:
    """The largest peak of a worker."""

    def of_worker(worker: Worker) -> float:
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    found: list[float] = opt.run_on_workers(of_worker)
    return max(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    samples = int(given.gigabytes * 1e9 / 4 / FEATURES)
    module = torch.nn.Linear(FEATURES, 1)
    options: dict[str, Any] = {"optimizer": None, "chunk_size": CHUNK, "cache": False, "parallelize": given.workers}
    with batchopt.BatchOptimizer(module, torch.nn.MSELoss(), **options) as opt:
        opt.load(Made(given.workers * CHUNK))
        opt.evaluate()
        before, of_workers = peak(), peaks(opt)
        began = time.perf_counter()
        opt.load(Made(samples))
        opt.evaluate()
        seconds = time.perf_counter() - began
        grown, grown_workers = peak() - before, peaks(opt) - of_workers
        available = psutil.virtual_memory().total
    chunk = 4.0 * CHUNK * FEATURES
    findings = [
        Finding(f"peak of the parent, growth for {given.gigabytes:g} GB / a chunk", grown / chunk, most=1.0),
        Finding("the same", grown / 1e6, "MB"),
        Finding("peak of a worker, growth / a chunk", grown_workers / chunk, most=4.0),
        Finding("one evaluation, reading included", seconds, "s"),
    ]
    publish("dataset", findings, {"chunk": f"{chunk / 1e6:g} MB", "memory": f"{available / 1e9:.0f} GB"})


if __name__ == "__main__":
    main()
