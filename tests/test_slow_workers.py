"""Workers that become slow in the middle of a run are measured, whether or not what they did counts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Worker
from batchopt.backends.process.paces import Overdue
from batchopt_workers.process.messages import Kind

DATA = torch.linspace(-1, 1, 240).view(120, 2), torch.linspace(0, 1, 120).view(120, 1)
WORKERS = 4


def slow_loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """So many seconds for each sample, in a worker that was sent."""
    time.sleep(len(x) * getattr(time, "batchopt_test_seconds", 0.001))
    return nn.functional.mse_loss(module(x), y)


def become(worker: Worker, seconds: dict[int, float]) -> None:
    vars(time)["batchopt_test_seconds"] = seconds.get(worker.rank, 0.001)


def hook(worker: Worker, sample: Any) -> None:
    """Hooks make the first evaluation the measurement."""


@pytest.mark.sampled
@pytest.mark.parametrize("hooked", [False, True])
def test_a_worker_whose_share_is_always_taken_over_is_measured(hooked: bool) -> None:
    with BatchOptimizer(
        nn.Linear(2, 1),
        loss_fn=slow_loss,
        optimizer=None,
        parallelize=WORKERS,
        prehook=hook if hooked else None,
        check_cut=False,
    ) as opt:
        if not hooked:
            opt.load(*DATA)
            opt.evaluate()
        opt.run_on_workers(become, {3: 0.008})
        if hooked:
            opt.load(*DATA)
        expected = nn.functional.mse_loss(opt.module(DATA[0]), DATA[1]).item()
        for _ in range(25):
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-5)
            speeds = [worker.speed for worker in opt.workers]
            if speeds[3] is not None and speeds[3] < 0.4 * min(speed or 0.0 for speed in speeds[:3]):
                break
        else:
            raise AssertionError(f"worker 3 counts as fast as the others: {speeds}")
        before = opt.workers[3].samples
        while opt.workers[3].samples == before:  # its smaller share counts
            opt.evaluate()
        opt.run_on_workers(become, {})
        for _ in range(100):  # and it is fast again
            opt.evaluate()
            recovered = [worker.speed or 0.0 for worker in opt.workers]
            if recovered[3] > 0.6 * max(recovered):
                break
        else:
            raise AssertionError(f"worker 3 counts as slow: {recovered}")


def test_nothing_is_shown_where_nobody_is_late() -> None:
    assert Overdue({Kind.EVALUATE: {}}).take(Kind.EVALUATE, []) == {}
