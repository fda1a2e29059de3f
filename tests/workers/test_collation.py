"""What collate functions make is kept from the second evaluation on, and is never another thing than they would
make."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.data.collation import Collation
from batchopt_workers.data.items import Items, Unreadable

KEY = (0, 0, 4)


class Graphs:
    """As a library would have one: tensors in attributes, which users replace."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.same, self.names = x, x, ["a"]


class Collating:
    """Counts."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.count = make, 0

    def __call__(self) -> Any:
        self.count += 1
        return self.make()


def graphs() -> Graphs:
    return Graphs(torch.arange(4.0).requires_grad_())


def run(kept: Collation, collate: Callable[[], Any], use: Callable[[Any], object] = id, times: int = 1) -> Any:
    """As so many evaluations do."""
    for _ in range(times):
        made = kept.of(KEY, collate)
        use(made)
        kept.check()
    return made


def set_attribute(made: Graphs) -> None:
    made.x = made.x * 2
    made.names.append("b")


def require_grad(made: Graphs) -> None:
    made.x.grad = torch.ones(4)


def in_place(made: Graphs) -> None:
    with torch.no_grad():
        made.x.mul_(2)


def past_the_counter(made: Graphs) -> None:
    made.x.data.mul_(2)


@pytest.mark.parametrize("use, times", [(set_attribute, 2), (require_grad, 2), (in_place, 5), (past_the_counter, 5)])
def test_a_piece_is_collated_twice_and_then_kept_unless_its_tensors_are_written(
    use: Callable[[Any], object], times: int
) -> None:
    """What is done to the structure is not seen by the next."""
    kept, collate, found = Collation(), Collating(graphs), []
    for _ in range(5):
        made = kept.of(KEY, collate)
        found.append(made.x)
        assert isinstance(made, Graphs) and made.x is made.same and made.x.is_leaf and made.x.requires_grad
        assert (made.x.tolist(), made.x.grad, made.names) == ([0, 1, 2, 3], None, ["a"])
        use(made)
        kept.check()
    assert collate.count == times and len({id(x) for x in found}) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(3),
        lambda: torch.tensor(np.random.random()),
        lambda: torch.tensor(random.random()),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: (line for line in "ab"),
    ],
    ids=["torch's draws", "NumPy's", "Python's", "sparse", "a parameter", "a result of autograd", "a generator"],
)
def test_what_draws_or_what_nobody_can_watch_is_collated_each_time(make: Callable[[], Any]) -> None:
    kept, collate = Collation(), Collating(make)
    run(kept, collate, times=4)
    assert collate.count == 4


@pytest.mark.parametrize("same", [True, False])
def test_what_another_worker_had_is_read_if_what_was_read_here_is_the_same(same: bool) -> None:
    found, numbers = Collation(), iter(range(10))
    read = Collating(lambda: torch.tensor([0 if same else next(numbers)]))
    for key in ((0, 0, 4), (0, 4, 8)):
        found.of(key, read, cache=True)
    assert read.count == 2  # nothing is read twice in the evaluation that it is first read in
    found.settle()
    found.of((0, 0, 4), read, cache=True)
    if same:
        found.of((0, 8, 12), read, cache=True)
        assert read.count == 4
    else:
        with pytest.raises(ValueError, match="reading the same items again gave different values"):
            found.of((0, 8, 12), read, cache=True)


# ---- items are read, collated, and laid out as the rows of tensors would be


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]


class Rows:
    """Items that are the rows of a tensor, and their index."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.tensor[index], index


def stack(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([i for _, i in items])


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 7), max_size=2).map(tuple),
    start=st.integers(0, 11),
    count=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_what_is_read_lies_as_the_rows_of_a_tensor_in_shared_memory(
    dtype: torch.dtype, shape: tuple[int, ...], start: int, count: int
) -> None:
    whole = (torch.rand(20, *shape) * 100).to(dtype)
    inputs, targets = Items(Rows(whole), 20).read(start, start + count, stack)
    assert torch.equal(inputs, whole[start : start + count]) and targets.tolist() == [*range(start, start + count)]
    assert inputs.is_contiguous() and inputs.is_leaf
    if whole.numel():
        row = whole[0].numel() * whole.element_size()
        assert inputs.data_ptr() % 64 == start * row % 64
    assert targets.data_ptr() % 64 == start * 8 % 64


def test_an_item_of_whose_targets_one_is_ignored_is_named() -> None:
    items = [(0, torch.tensor([0, 3 * (i == 2)])) for i in range(4)]

    def collate(items: list[Any]) -> Any:
        return None, torch.stack([y for _, y in items])

    assert Items(items, 4, ignored=2).read(0, 4, collate)[1].shape == (4, 2)
    with pytest.raises(Unreadable) as caught:
        Items(items, 4, ignored=3).read(1, 4, collate)
    assert caught.value.index == 2 and "ignore_index, 3" in str(caught.value.error)
