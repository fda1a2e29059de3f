from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt_workers.data.places import LARGEST_STATISTIC
from batchopt_workers.map.module_state import ModuleState, places_of_state


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


def unchanged(buffers: ModuleState) -> bool:
    return not any(values_and_flags(buffers)[1])


def end_step(buffers: ModuleState) -> None:
    """One chunk has changed them, and the step takes that over."""
    changes = changes_of(buffers)
    buffers.restore()
    buffers.take_over(changes)


def test_statistics_are_the_buffers_with_all_their_places_but_for_what_cannot_be_one() -> None:
    tied = torch.zeros(2)
    module = nn.Sequential(
        Holder(a=tied, none=None, large=torch.empty(LARGEST_STATISTIC + 1), sparse=torch.zeros(3).to_sparse()),
        Holder(b=torch.empty(LARGEST_STATISTIC), a=tied, c=tied, spectrum=torch.zeros(2, dtype=torch.complex64)),
        Holder(wide=torch.zeros(1).expand(3)),
    )
    found = [[(place.owner, place.name) for place in places] for places in places_of_state(module)]
    assert found == [[(module[0], "a"), (module[1], "a"), (module[1], "c")], [(module[1], "b")]]
    assert ModuleState(module[0]).size == 2 * 2 and ModuleState(module[2]).size == 0


def test_there_is_a_value_and_a_flag_for_each_element_or_nothing_to_report() -> None:
    assert ModuleState(Holder(a=torch.zeros(2, 3), b=torch.tensor(0), c=torch.zeros(0), d=None)).size == 2 * 7
    for module in (nn.Linear(2, 2), Holder(a=torch.zeros(0))):
        buffers = ModuleState(module)
        assert buffers.size == 0
        end_step(buffers)
        buffers.begin_step()


@WAYS
@SHARED
def test_restore_puts_the_values_of_the_steps_start_back(change: Change, shared: bool) -> None:
    module = Holder(mean=torch.ones(2), count=torch.tensor(3))
    buffers = ModuleState(module, shared)
    own = module.get_buffer("mean")
    for _ in range(2):
        change(module, "mean", 1.0)
        change(module, "count", 1)
        buffers.restore()
        assert module.get_buffer("mean").tolist() == [1.0, 1.0]
        assert module.get_buffer("count").item() == 3
        assert module.get_buffer("mean") is own
        assert unchanged(buffers)


@WAYS
def test_values_are_weighted_for_statistics_and_those_of_the_first_chunk_for_counters(change: Change) -> None:
    module = Holder(mean=torch.tensor([1.0, 2.0]), count=torch.tensor(3), flag=torch.tensor(False))
    buffers = ModuleState(module)
    change(module, "mean", 4.0)
    change(module, "count", 5)
    module.get_buffer("flag").logical_not_()
    assert values_and_flags(buffers, 0.25, first=True) == ([1.25, 1.5, 8.0, 1.0], [1.0] * 4)
    assert values_and_flags(buffers, 0.25, first=False) == ([1.25, 1.5, 0.0, 0.0], [1.0] * 4)
    end_step(buffers)
    assert [buffer.tolist() for buffer in module.buffers()] == [[5.0, 6.0], 8, True]


def test_only_elements_that_differ_from_the_start_are_flagged() -> None:
    start = torch.tensor([1.0, torch.inf, torch.nan, -torch.inf, torch.nan, 0.0])
    module = Holder(mean=start, count=torch.tensor([3, 4]))
    buffers = ModuleState(module)
    assert unchanged(buffers)
    module.get_buffer("mean")[3:] = torch.tensor([torch.inf, 0.0, torch.nan])
    module.get_buffer("count")[1] = 5
    assert values_and_flags(buffers)[1] == [0, 0, 0, 1, 1, 1, 0, 1]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_chunk_leaves_batch_norm_bit_for_bit_as_one_process_does(
    dtype: torch.dtype, momentum: float | None
) -> None:
    module = nn.BatchNorm1d(3, momentum=momentum, dtype=dtype)
    reference = copy.deepcopy(module)
    buffers = ModuleState(module)
    inputs = torch.linspace(-2, 5, 24, dtype=dtype).view(4, 2, 3)
    for step in inputs.sin():
        buffers.begin_step()
        for _ in range(3):  # evaluations of the step
            module(step)
            changes = changes_of(buffers)
            buffers.restore()
        buffers.take_over(changes)
        reference(step)
        for name, expected in reference.named_buffers():
            assert torch.equal(module.get_buffer(name), expected)
    assert module.get_buffer("num_batches_tracked").item() == 4


@WAYS
def test_a_step_starts_from_what_the_module_has_then(change: Change) -> None:
    module = Holder(mean=torch.zeros(1))
    buffers = ModuleState(module)
    change(module, "mean", 5.0)
    buffers.begin_step()
    assert unchanged(buffers)
    change(module, "mean", 1.0)
    assert values_and_flags(buffers) == ([6.0], [1.0])
    buffers.restore()
    assert module.get_buffer("mean").tolist() == [5.0]


def test_shared_values_are_read_at_the_steps_start_and_never_written() -> None:
    start = torch.ones(2)
    module = Holder(mean=start)
    buffers = ModuleState(module, shared=True)
    in_place(module, "mean", 1.0)
    buffers.take_over(changes_of(buffers))
    assert start.tolist() == [1.0, 1.0]
    start.fill_(9.0)
    assert module.get_buffer("mean").tolist() == [2.0, 2.0]
    buffers.begin_step()
    assert module.get_buffer("mean").tolist() == [9.0, 9.0]
    assert unchanged(buffers)


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


@WAYS
def test_buffers_whose_memory_is_in_another_order_keep_their_elements_in_place(change: Change) -> None:
    start = torch.arange(6.0).view(2, 3).t()
    module = Holder(mean=start.clone())
    buffers = ModuleState(module)
    change(module, "mean", 1.0)
    end_step(buffers)
    assert torch.equal(module.get_buffer("mean"), start + 1)


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


def test_an_update_with_autograd_history_is_a_value_and_no_graph_outlives_the_chunk() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(2))
    mean = module.get_buffer("mean")
    buffers = ModuleState(module)
    mean.mul_(0.5).add_(module.weight.sum(0))
    found = changes_of(buffers)
    assert torch.equal(found[:2].float(), module.weight.sum(0)) and found[2:].all()
    buffers.restore()
    assert module.get_buffer("mean") is mean and not mean.requires_grad and not mean.any()


def test_a_buffer_replaced_between_steps_is_the_one_that_counts_and_tied_no_more() -> None:
    shared, new = torch.zeros(3), torch.ones(5, dtype=torch.int64)
    module: Any = nn.Sequential(Holder(value=shared), Holder(value=shared))
    buffers = ModuleState(module)
    module[1].value = new
    buffers.begin_step()
    assert module[0].value is shared and module[1].value is new
    assert not shared.any() and new.all()
    module[1].value += 1
    assert values_and_flags(buffers) == ([0.0] * 3 + [2.0] * 5, [0.0] * 3 + [1.0] * 5)


def test_what_is_named_as_state_is_restored_and_reported_whatever_it_is() -> None:
    module: Any = Holder(spectrum=torch.ones(2, dtype=torch.complex64), wide=torch.zeros(1).expand(3))
    module.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    module.count = torch.zeros(1)
    buffers = ModuleState(module, state=("spectrum", "wide", "frozen", "count"))
    buffers.begin_step()
    module.spectrum.mul_(1j)
    module.wide[0] += 2
    module.frozen.data.add_(3)
    module.count += 4
    values, flags = values_and_flags(buffers)
    assert sorted(values) == [0, 0, 1, 1, 2, 3, 4] and sum(flags) == 7
    changes = changes_of(buffers)
    buffers.restore()
    assert module.spectrum.tolist() == [1, 1] and not module.wide.any() and not module.frozen and not module.count
    buffers.take_over(changes)
    assert module.spectrum.tolist() == [1j, 1j] and module.wide.tolist() == [2, 2, 2]
    assert module.frozen.item() == 3 and module.count.item() == 4
