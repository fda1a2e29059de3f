"""`chunk_size="auto"`: the fastest of three sizes, of the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer

X = torch.linspace(-2.0, 2.0, 1280 * 3, dtype=torch.float64).reshape(1280, 3).sin()
Y = torch.linspace(-1.0, 3.0, 1280, dtype=torch.float64).reshape(1280, 1).cos()


def line() -> nn.Module:
    return nn.Linear(3, 1).double()


@pytest.fixture(params=["small", "large"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether small or large chunks are faster, by a clock of our own: the machine's may be busy."""
    with BatchOptimizer(line(), nn.MSELoss(), optimizer=None, chunk_size="auto") as opt:
        assert opt._engine.policies.tuner is not None
        search: Any = type(opt._engine.policies.tuner.search)
    took = search.took

    def timed(self: Any, seconds: float) -> None:
        size = self.present.chunk_size or 10_000
        took(self, size / 1e4 if request.param == "small" else 1 / size)

    monkeypatch.setattr(search, "took", timed)
    return str(request.param)


def evaluated(module: nn.Module, evaluations: int = 50, **options: Any) -> BatchOptimizer:
    opt = BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size="auto", **options)
    opt.load(X, Y)
    expected = nn.functional.mse_loss(module(X), Y).item()
    for _ in range(evaluations):
        assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)
    return opt


def size_of(opt: BatchOptimizer) -> int | None:
    step = opt._engine.step
    assert step is not None
    return step.chunk_size


@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [1, 2])
def test_smaller_chunks_are_used_where_they_are_faster(parallelize: int, faster: str) -> None:
    expected = 1280 // parallelize // 16 if faster == "small" else None
    with evaluated(line(), parallelize=parallelize) as opt:
        assert size_of(opt) == expected
        opt.load(X[:640], Y[:640])
        assert size_of(opt) == expected  # for later batches, too


@pytest.mark.slow
@pytest.mark.parametrize("faster", ["small"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*statistics of a chunk")
def test_what_depends_on_the_cut_is_not_cut(faster: str) -> None:
    with evaluated(nn.Sequential(line(), nn.BatchNorm1d(1).double())) as opt:
        assert size_of(opt) is None


@pytest.mark.parametrize("faster", ["small"], indirect=True)
def test_what_draws_is_not_cut_otherwise(faster: str) -> None:
    module = nn.Sequential(line(), nn.Dropout(0.5))
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size="auto") as opt:
        opt.load(X, Y)
        assert len({opt.evaluate().item() for _ in range(50)}) == 1
        assert size_of(opt) is None


def test_deterministic_algorithms_have_fixed_chunks() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with evaluated(line()) as opt:
            assert size_of(opt) == 40
    finally:
        torch.use_deterministic_algorithms(False)
