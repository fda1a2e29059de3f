from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt_workers.map.module_state import ModuleState


class Holder(nn.Module):
    """A module of the given buffers."""

    def __init__(self, **buffers: torch.Tensor | None) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def in_place(module: nn.Module, name: str, by: float) -> None:
    module.get_buffer(name).add_(by)


def by_assignment(module: nn.Module, name: str, by: float) -> None:
    setattr(module, name, module.get_buffer(name) + by)


WAYS = pytest.mark.parametrize("change", [in_place, by_assignment])
SHARED = pytest.mark.parametrize("shared", [False, True])
Change = Callable[[nn.Module, str, float], None]


def changes_of(buffers: ModuleState, share: float = 1.0, first: bool = True) -> torch.Tensor:
    out = torch.full((buffers.size,), torch.nan, dtype=torch.float64)
    buffers.changes(out, share, first)
    return out


def values_and_flags(buffers: ModuleState, share: float = 1.0, first: bool = True) -> tuple[list[float], list[float]]:
    values, flags = changes_of(buffers, share, first).view(2, -1).tolist()
    return values, flags


def end_step(buffers: ModuleState) -> None:
    """One chunk has changed them, and the step takes that over."""
    changes = changes_of(buffers)
    buffers.restore()
    buffers.take_over(changes)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-100, 100)), min_size=1, max_size=6), st.booleans())
@settings(deadline=None)
def test_a_step_takes_over_the_weighted_mean_of_the_chunks_values(
    chunks: list[tuple[int, float]], shared: bool
) -> None:
    size = sum(samples for samples, _ in chunks)
    module = Holder(mean=torch.tensor([1.0, -2.0], dtype=torch.float64), count=torch.tensor(7))
    buffers = ModuleState(module, shared)
    summed = torch.zeros(buffers.size, dtype=torch.float64)
    for i, (samples, by) in enumerate(chunks):
        in_place(module, "mean", by)
        in_place(module, "count", i + 1)
        summed += changes_of(buffers, samples / size, first=i == 0)
        buffers.restore()
    buffers.take_over(summed)
    average = sum(samples * by for samples, by in chunks) / size
    assert module.get_buffer("mean").tolist() == pytest.approx([1.0 + average, -2.0 + average])
    assert module.get_buffer("count").item() == 8


@SHARED
@WAYS
@pytest.mark.parametrize("place", [0, 1])
def test_a_tied_buffer_that_changes_in_one_place_is_seen_and_restored_in_all(
    place: int, change: Change, shared: bool
) -> None:
    tied = torch.ones(2)
    module = nn.Sequential(Holder(a=tied), Holder(a=tied, none=None))
    buffers = ModuleState(module, shared)
    own = module[0].get_buffer("a")
    assert (own is tied) != shared
    change(module[place], "a", 1.0)
    assert values_and_flags(buffers) == ([2.0, 2.0], [1.0, 1.0])
    changes = changes_of(buffers)
    buffers.restore()
    assert module[0].get_buffer("a") is own and module[1].get_buffer("a") is own
    assert own.tolist() == [1.0, 1.0]
    buffers.take_over(changes)
    assert own.tolist() == [2.0, 2.0]


def summed_over(buffers: ModuleState, chunks: int, change: Callable[[int], object]) -> torch.Tensor:
    """The changes of equal chunks, of which each does `change(chunk)`."""
    summed = torch.zeros(buffers.size, dtype=torch.float64)
    for chunk in range(chunks):
        change(chunk)
        summed += changes_of(buffers, 1 / chunks, first=chunk == 0)
        buffers.restore()
    return summed


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_a_mean_would_spoil_stays_while_a_neighbour_changes(chunks: int) -> None:
    """Numbers that are not finite, and integers that doubles cannot tell apart."""
    large = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]
    module = Holder(mean=torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]), counts=torch.tensor([*large, 0]))
    mean, counts = module.get_buffer("mean"), module.get_buffer("counts")
    buffers = ModuleState(module)
    buffers.take_over(summed_over(buffers, chunks, lambda i: (mean[3:].add_(6.0), counts[4:].add_(i + 1))))
    torch.testing.assert_close(mean, torch.tensor([torch.inf, -torch.inf, torch.nan, 7.0]), equal_nan=True)
    assert counts.tolist() == [*large, 1]


@pytest.mark.parametrize("start", [torch.inf, -torch.inf, torch.nan])
def test_what_was_no_finite_number_becomes_the_one_that_a_chunk_made_of_it(start: float) -> None:
    module = Holder(least=torch.tensor([start, 0.0]))
    buffers = ModuleState(module)
    module.get_buffer("least")[0] = 1.0
    end_step(buffers)
    assert module.get_buffer("least").tolist() == [1.0, 0.0]


def test_elements_that_no_chunk_changed_keep_their_bits() -> None:
    start = torch.linspace(-3, 3, 50, dtype=torch.float64).exp()
    module = Holder(mean=start.clone())
    buffers = ModuleState(module)
    buffers.take_over(summed_over(buffers, 7, lambda chunk: module.get_buffer("mean")[0].add_(chunk)))
    assert module.get_buffer("mean")[0].item() == pytest.approx(start[0].item() + 3)
    assert torch.equal(module.get_buffer("mean")[1:], start[1:])


@SHARED
@pytest.mark.parametrize("new, words", [(torch.zeros(3), r"was \(2,\) .* replaced by \(3,\)"), (None, "became None")])
def test_a_buffer_that_changed_its_shape_or_became_none_is_named(
    new: torch.Tensor | None, words: str, shared: bool
) -> None:
    module = Holder(mean=torch.zeros(2))
    buffers = ModuleState(module, shared)
    module.register_buffer("mean", new)
    with pytest.raises(ValueError, match=f"buffer 'mean' of Holder {words}"):
        changes_of(buffers)
    buffers.restore()
    assert module.get_buffer("mean").tolist() == [0.0, 0.0]
