"""What happens when a worker becomes slow in the middle of a full-batch L-BFGS run?

Two workers, each bound to a core; before evaluation 30 somebody else begins to compute on the second core. How many
evaluations later is the time of an evaluation within a tenth of what it settles at; and is the path of the line searches the
one that it takes when nothing happens: with `chunk_size` to the last bit, without to rounding (float64).

    python -m benchmarks.slowdown [--workload mlp] [--iterations 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

import batchopt
from benchmarks.findings import Finding, publish
from benchmarks.uneven_workers import busy
from benchmarks.workloads import WORKLOADS, build

WHEN = 30


class Timed(batchopt.BatchOptimizer):
    """Keeps the loss, the seconds and the shares of each evaluation; before evaluation `WHEN` something happens."""

    def watch(self, happens: Any) -> None:
        """Begin."""
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.shares: list[list[int]] = []
        self.happens = happens

    def evaluate(self) -> torch.Tensor:
        """As ever."""
        if len(self.losses) == WHEN:
            self.happens()
        before = [worker.samples for worker in self.workers]
        started = time.perf_counter()
        loss = super().evaluate()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())
        self.shares.append([worker.samples - b for worker, b in zip(self.workers, before, strict=True)])
        return loss


def run(workload: str, iterations: int, chunk_size: int | None, disturbed: bool) -> Timed:
    """One L-BFGS run; what it kept."""
    case = build(workload)
    inputs = case.inputs[: len(case.inputs) // 2].double()
    with (
        ExitStack() as stack,
        Timed(
            case.module.double(),
            loss_fn=case.loss,
            optimizer=lambda p: torch.optim.LBFGS(
                p, max_iter=iterations, max_eval=10**6, line_search_fn="strong_wolfe"
            ),
            parallelize=2,
            chunk_size=chunk_size,
            precode=lambda worker: os.sched_setaffinity(0, {worker.rank}),
        ) as opt,
    ):
        opt.watch((lambda: stack.enter_context(busy(1))) if disturbed else (lambda: None))
        opt.step(inputs, None if case.targets is None else case.targets[: len(inputs)])
        return opt


def settled_after(opt: Timed) -> int:
    """Evaluations after the disturbance until the first that takes as long as the last ones do, within a tenth."""
    after = opt.seconds[WHEN:]
    level = statistics.median(after[-10:])
    return next(i for i, seconds in enumerate(after) if seconds <= 1.1 * level)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mlp")
    parser.add_argument("--iterations", type=int, default=60)
    given = parser.parse_args()
    findings, details = [], {}
    for name, chunk_size in (("without chunk_size", None), ("with chunk_size", 64)):
        calm, disturbed = (run(given.workload, given.iterations, chunk_size, flag) for flag in (False, True))
        both = list(zip(calm.losses, disturbed.losses, strict=False))
        far = max(abs(a - b) / abs(a) for a, b in both)
        extra = abs(len(calm.losses) - len(disturbed.losses))
        findings += [
            Finding(f"a worker slows down, {name}: evaluations until rebalanced", settled_after(disturbed), most=10),
            Finding(
                "  largest relative difference to the undisturbed losses", far, most=1e-9 if chunk_size is None else 0.0
            ),
            Finding("  evaluations more or less", extra, most=0),
        ]
        details[name] = {"seconds": disturbed.seconds, "shares": disturbed.shares}
    publish("slowdown", findings, details)


if __name__ == "__main__":
    main()
