"""Items are read, collated, and laid out as the rows of tensors would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.data.items import Items, Unreadable

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


def test_other_things_than_rows_begin_at_a_multiple_of_64_bytes_and_keep_their_order() -> None:
    turned = torch.rand(3, 5).t()
    inputs, _ = Items([0, 0], 2).read(1, 2, lambda items: {"edges": turned, "name": "a"})
    assert torch.equal(inputs["edges"], turned) and inputs["edges"].stride() == turned.stride()
    assert inputs["edges"].data_ptr() % 64 == 0 and inputs["name"] == "a"


def test_leaves_require_grad_as_what_was_collated() -> None:
    x = torch.rand(4, 3, requires_grad=True)
    inputs, targets = Items(x, 4).read(1, 3, lambda items: torch.stack(items) * 2)
    assert inputs.is_leaf and inputs.requires_grad and targets is None


@pytest.mark.parametrize(
    ("made", "inputs", "targets"),
    [((1, 2), 1, 2), ([1, 2], 1, 2), ((1,), 1, None), ({"x": 1}, {"x": 1}, None), (1, 1, None)],
)
def test_what_is_collated_is_read_as_from_a_loader(made: Any, inputs: Any, targets: Any) -> None:
    assert Items([0], 1).read(0, 1, lambda items: made) == (inputs, targets)


def test_an_item_that_raises_is_named() -> None:
    class Broken:
        def __getitem__(self, index: int) -> int:
            return 1 // (index - 5)

    with pytest.raises(Unreadable) as caught:
        Items(Broken(), 9).read(3, 7, list)
    assert caught.value.index == 5 and isinstance(caught.value.error, ZeroDivisionError)


@pytest.mark.parametrize("target", [torch.tensor(3), torch.tensor([0, 3])])
def test_an_item_whose_target_is_ignored_is_named(target: torch.Tensor) -> None:
    other = torch.zeros_like(target)
    items = [(0, other), (0, other), (0, target), (0, other)]

    def collate(items: list[Any]) -> Any:
        return None, torch.stack([y for _, y in items])

    assert Items(items, 4, ignored=2).read(0, 4, collate)[1].shape == (4, *target.shape)
    with pytest.raises(Unreadable) as caught:
        Items(items, 4, ignored=3).read(1, 4, collate)
    assert caught.value.index == 2 and "ignore_index, 3" in str(caught.value.error)
