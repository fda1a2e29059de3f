"""Functions of the batch on worker processes whose speeds differ, and in the user's own loop."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from tests.workloads import Mlp

X = torch.linspace(-2.0, 2.0, 60 * 6, dtype=torch.float64).reshape(60, 6).sin()


def rows(module: nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
    """Those of the samples."""
    return inputs


@pytest.mark.parametrize("speeds", [(1.0, 9.0, 3.0), (0.001, 1.0, 0.001)])
def test_results_come_in_the_order_of_samples_whatever_the_shares(speeds: tuple[float, ...]) -> None:
    with BatchOptimizer(Mlp().double(), nn.MSELoss(), optimizer=None, parallelize=3, speeds=speeds) as opt:
        assert torch.equal(opt.collect(rows, X), X)
        assert torch.equal(torch.stack(opt.collect(lambda m, inputs, targets: [*inputs], X)), X)
        torch.testing.assert_close(opt.total(lambda m, inputs, targets: inputs.sum(0), X), X.sum(0))


def test_work_that_changes_hands_stays_in_order() -> None:
    def late(module: nn.Module, inputs: torch.Tensor, targets: None) -> torch.Tensor:
        time.sleep(0.05 if inputs[0, 0] < X[30, 0] else 0.001)
        return inputs

    with BatchOptimizer(Mlp().double(), nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=2) as opt:
        assert torch.equal(opt.collect(late, X), X)
        with opt.timeline() as timeline:
            assert torch.equal(opt.collect(late, X), X)
        assert "collect" in str(timeline)
        done = {
            lane: sum(e.details["samples"] for e in timeline.events if e.lane == lane and e.name == "collect")
            for lane in (0, 1)
        }
        assert sum(done.values()) >= len(X) and done[1] > done[0]


def test_tasks_share_the_work_by_what_they_have_shown() -> None:
    def counted(module: nn.Module, inputs: torch.Tensor, targets: None) -> list[int]:
        time.sleep(len(inputs) * (0.01 if os.environ["RANK"] == "1" else 0.002))
        return [len(inputs)] * len(inputs)

    with BatchOptimizer(Mlp().double(), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        opt.run_on_workers(lambda worker: os.environ.update(RANK=str(worker.rank)))
        first, *_, last = opt.collect(counted, X)
        assert first == last == 30
        first, *_, last = opt.collect(counted, X)
        assert first + last == 60 and first > 1.5 * last
