"""Buffers that forwards change: after a step they are the mean of what the chunks made of them, weighted by samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, WorkerError

LARGE = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]  # which doubles cannot tell from their neighbours
NOT_FINITE = [torch.inf, -torch.inf, torch.nan]
X = torch.arange(1.0, 11.0)[:, None]  # in chunks of 4, 4 and 2


class Writing(nn.Module):
    """Holds buffers, and writes them in each forward."""

    def __init__(self, write: Callable[[Any, torch.Tensor], object], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.factor, self.write = nn.Parameter(torch.ones(1)), write
        self.other = nn.Module()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
            self.other.register_buffer(name, buffer)  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, x)
        return x * self.factor


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# What is written, the buffer before, and after a step.
WRITTEN: dict[str, tuple[Callable[[Any, torch.Tensor], object], torch.Tensor, torch.Tensor]] = {
    "a mean": (lambda m, x: m.kept.add_(x.sum()), tensor(1, -2), tensor(1, -2) + (4 * 10 + 4 * 26 + 2 * 19) / 10),
    "a mean, assigned": (lambda m, x: setattr(m, "kept", m.kept + x.mean()), tensor(1), tensor(6.5)),
    "in another place": (lambda m, x: m.other.kept.add_(1), tensor(1), tensor(2)),
    "assigned in another place": (lambda m, x: setattr(m.other, "kept", m.other.kept + 1), tensor(1), tensor(2)),
    "a count": (lambda m, x: m.kept.add_(1), torch.tensor(7), torch.tensor(8)),
    "beside what is not finite": (
        lambda m, x: m.kept[3:].add_(6),
        tensor(*NOT_FINITE, 1),
        tensor(*NOT_FINITE, 7),
    ),
    "beside large integers": (
        lambda m, x: m.kept[4:].add_(1),
        torch.tensor([*LARGE, 0]),
        torch.tensor([*LARGE, 1]),
    ),
    "beside what keeps its bits": (
        lambda m, x: m.kept[0].add_(x.mean()),
        torch.linspace(-3, 3, 50).double().exp(),
        torch.linspace(-3, 3, 50).double().exp() + tensor(5.5, *[0] * 49),
    ),
    **{f"what was {start}": (lambda m, x: m.kept[0].fill_(1), tensor(start, 0), tensor(1, 0)) for start in NOT_FINITE},
}


@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_step_takes_over_what_the_chunks_have_written(name: str, parallelize: int) -> None:
    write, before, after = WRITTEN[name]
    module = Writing(write, kept=before.clone())
    with BatchOptimizer(module, nn.MSELoss(), chunk_size=4, parallelize=parallelize, optimizer="sgd") as opt:
        opt.step(X, X)
        kept = module.get_buffer("kept")
        assert module.other.get_buffer("kept") is kept
        torch.testing.assert_close(kept, after, rtol=1e-14, atol=0, equal_nan=True)
        unwritten = before == after
        assert torch.equal(kept[unwritten], before[unwritten])  # to the bit


@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("new, words", [(torch.zeros(3), r"was \(2,\) .* replaced by \(3,\)"), (None, "became None")])
def test_a_buffer_that_changes_its_shape_or_becomes_none_is_named(
    new: torch.Tensor | None, words: str, parallelize: int
) -> None:
    module = Writing(lambda m, x: m.register_buffer("kept", new), kept=torch.zeros(2))
    with BatchOptimizer(module, nn.MSELoss(), optimizer="sgd", parallelize=parallelize) as opt:
        with pytest.raises(WorkerError, match=f"buffer 'kept' of Writing {words}"):
            opt.step(X, X)
        assert module.get_buffer("kept").tolist() == [0.0, 0.0]
