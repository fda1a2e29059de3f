"""`chunk_size="auto"`: the fastest of three sizes, of the same function."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer

X = torch.linspace(-2.0, 2.0, 1280 * 3, dtype=torch.float64).reshape(1280, 3).sin()
Y = torch.linspace(-1.0, 3.0, 1280, dtype=torch.float64).reshape(1280, 1).cos()


class Timed(nn.Module):
    """Takes some milliseconds for each forward, and more for each sample."""

    def __init__(self, each: float, sample: float) -> None:
        super().__init__()
        self.layer, self.each, self.sample = nn.Linear(3, 1).double(), each, sample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.each + self.sample * len(x) ** 1.5)
        found: torch.Tensor = self.layer(x)
        return found


def evaluated(module: nn.Module, evaluations: int = 16, **options: Any) -> BatchOptimizer:
    opt = BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size="auto", **options)
    opt.load(X, Y)
    expected = nn.functional.mse_loss(module(X), Y).item()
    for _ in range(evaluations):
        assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)
    return opt


def size_of(opt: BatchOptimizer) -> int | None:
    step = opt._function.step
    assert step is not None
    return step.chunk_size


@pytest.mark.parametrize("parallelize", [1, 2])
def test_smaller_chunks_are_used_where_they_are_faster(parallelize: int) -> None:
    with evaluated(Timed(0.0, 2e-6), parallelize=parallelize) as opt:
        assert size_of(opt) == 1280 // parallelize // 16
        opt.load(X[:640], Y[:640])
        assert size_of(opt) == 1280 // parallelize // 16  # for later batches, too


def test_a_share_stays_whole_where_that_is_faster() -> None:
    with evaluated(Timed(2e-3, 0.0)) as opt:
        assert size_of(opt) is None


@pytest.mark.filterwarnings("ignore:.*statistics of a chunk")
def test_what_depends_on_the_cut_is_not_cut() -> None:
    with evaluated(nn.Sequential(Timed(0.0, 2e-6), nn.BatchNorm1d(1).double())) as opt:
        assert size_of(opt) is None


def test_what_draws_is_not_cut_otherwise() -> None:
    module = nn.Sequential(Timed(0.0, 2e-6), nn.Dropout(0.5))
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size="auto") as opt:
        opt.load(X, Y)
        assert len({opt.evaluate().item() for _ in range(12)}) == 1
        assert size_of(opt) is None


def test_deterministic_algorithms_have_fixed_chunks() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with evaluated(Timed(0.0, 0.0)) as opt:
            assert size_of(opt) == 40
    finally:
        torch.use_deterministic_algorithms(False)


def test_others_are_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="`chunk_size`"):
        BatchOptimizer(nn.Linear(3, 1), nn.MSELoss(), chunk_size="some")  # type: ignore[arg-type]
