from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.data.layout import Layout

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return Layout.of([(f"p{i}", torch.empty(shape)) for i, shape in enumerate(shapes)], torch.float32)


@given(SHAPES)
@settings(deadline=None)
def test_slots_follow_one_another_without_gaps(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    end = 0
    for i, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        assert (slot.name, slot.shape, slot.offset) == (f"p{i}", shape, end)
        assert slot.numel == torch.empty(shape).numel()
        end += slot.numel
    assert layout.size == end


@given(SHAPES)
@settings(deadline=None)
def test_views_cut_the_vector_in_order(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    views = layout.views(torch.arange(layout.size))
    assert [view.shape for view in views] == shapes
    assert [x for view in views for x in view.flatten().tolist()] == list(range(layout.size))


@given(SHAPES)
@settings(deadline=None)
def test_views_share_the_memory_of_the_vector(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    vector = torch.zeros(layout.size)
    views = layout.views(vector)
    for view in views:
        view.fill_(1.0)
    assert vector.tolist() == [1.0] * layout.size
    vector.fill_(2.0)
    assert all(bool((view == 2.0).all()) for view in views)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_are_summed_in_single_precision_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert Layout((), dtype).sum_dtype is expected
