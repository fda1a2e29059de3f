"""What happens when a worker becomes slow in the middle of a full-batch L-BFGS run?

Two workers, each bound to a core; before evaluation 30 somebody else begins to compute on the second core. How many
evaluations later is the time of an evaluation within a tenth of what it settles at, and how far is that from the ideal;
and is the path of the line searches the one that it takes when nothing happens: with `chunk_size` to the last bit,
without to rounding (float64).

And six workers that sleep instead of computing, of which one becomes five times slower (without `chunk_size`): so much
more than that what it does always comes too late.

    python -m benchmarks.slowdown [--workload pinn] [--iterations 80] [--only-sleeping]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

import batchopt
from benchmarks.findings import Finding, publish
from benchmarks.uneven_workers import busy
from benchmarks.workloads import WORKLOADS, build

WHEN = 30


class Timed(batchopt.BatchOptimizer):
    """Keeps the loss, the seconds and the shares of each evaluation; before evaluation `WHEN` something happens."""

    def watch(self, happens: Callable[[], None]) -> None:
        """Begin."""
        self.found: list[float] = []
        self.seconds: list[float] = []
        self.shares: list[list[int]] = []
        self.happens = happens

    def evaluate(self) -> torch.Tensor:
        """As ever."""
        if len(self.found) == WHEN:
            self.happens()
        before = [worker.samples for worker in self.workers]
        started = time.perf_counter()
        loss = super().evaluate()
        self.seconds.append(time.perf_counter() - started)
        self.found.append(loss.item())
        self.shares.append([worker.samples - b for worker, b in zip(self.workers, before, strict=True)])
        return loss


def run(workload: str, iterations: int, chunk_size: int | None, disturbed: bool) -> Timed:
    """One L-BFGS run; what it kept."""
    case = build(workload)
    inputs = case.inputs[: len(case.inputs) // 2].double()
    with (
        busy(1) as begin,
        Timed(
            case.module.double(),
            loss_fn=case.loss,
            optimizer=lambda p: torch.optim.LBFGS(
                p,
                max_iter=iterations,
                max_eval=10**6,
                tolerance_grad=0,
                tolerance_change=0,
                line_search_fn="strong_wolfe",
            ),
            parallelize=2,
            chunk_size=chunk_size,
            precode=lambda worker: os.sched_setaffinity(0, {worker.rank}),
        ) as opt,
    ):
        opt.watch(begin if disturbed else lambda: None)
        opt.step(inputs, None if case.targets is None else case.targets[: len(inputs)])
        return opt


def settled_after(opt: Timed) -> int:
    """Evaluations after the disturbance until they take as long as the last ones do, within a tenth: the first five
    of which the median does."""
    after = opt.seconds[WHEN:]
    level = statistics.median(after[-15:])
    return next(i for i in range(len(after)) if statistics.median(after[i : i + 5]) <= 1.1 * level)


SLEEPERS, SAMPLES, SECONDS, FACTOR = 6, 600, 0.0018, 5


def sleeping_loss(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sleeps for each sample."""
    time.sleep(len(x) * SECONDS * getattr(time, "factor", 1))
    return torch.nn.functional.mse_loss(module(x), y)


def slow_down(worker: batchopt.Worker) -> None:
    """The last worker, from now on."""
    vars(time)["factor"] = FACTOR if worker.rank == SLEEPERS - 1 else 1


def sleep(evaluations: int) -> tuple[list[Finding], dict[str, object]]:
    """Seconds of each evaluation after one of the workers that sleep has become slower."""
    x = torch.rand(SAMPLES, 1)
    with batchopt.BatchOptimizer(
        torch.nn.Linear(1, 1), loss_fn=sleeping_loss, optimizer=None, parallelize=SLEEPERS, check_cut=False
    ) as opt:
        opt.load(x, x)
        for _ in range(3):
            opt.evaluate()
        opt.run_on_workers(slow_down)
        seconds = []
        for _ in range(evaluations):
            started = time.perf_counter()
            opt.evaluate()
            seconds.append(time.perf_counter() - started)
    best = SAMPLES * SECONDS / (SLEEPERS - 1 + 1 / FACTOR)
    settled = statistics.median(seconds[-5:])
    needed = next(i for i in range(len(seconds)) if statistics.median(seconds[i : i + 3]) <= 1.1 * settled)
    name = f"one of {SLEEPERS} sleeping workers slows down {FACTOR} times: evaluations until rebalanced"
    return [Finding(name, needed, most=10), Finding("  ideal / the time that it settles at", best / settled)], {
        "sleeping": seconds
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="pinn")
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--only-sleeping", action="store_true")
    given = parser.parse_args()
    findings, details = sleep(20)
    for name, chunk_size in () if given.only_sleeping else (("without chunk_size", None), ("with chunk_size", 250)):
        calm, disturbed = (run(given.workload, given.iterations, chunk_size, flag) for flag in (False, True))
        both = list(zip(calm.found, disturbed.found, strict=False))
        far = max(abs(a - b) for a, b in both) / calm.found[0]
        ideal = statistics.median(calm.seconds[-15:]) * 2 / 1.5
        extra = abs(len(calm.found) - len(disturbed.found))
        findings += [
            Finding(f"a worker slows down, {name}: evaluations until rebalanced", settled_after(disturbed), most=10),
            Finding("  ideal / the time that it settles at", ideal / statistics.median(disturbed.seconds[-15:])),
            Finding(
                "  largest difference to the undisturbed losses / first loss", far, most=0.0 if chunk_size else 1e-9
            ),
            Finding("  evaluations more or less", extra, most=0),
        ]
        details[name] = {"seconds": disturbed.seconds, "shares": disturbed.shares}
    publish("slowdown", findings, details)


if __name__ == "__main__":
    main()
