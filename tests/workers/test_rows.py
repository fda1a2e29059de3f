"""Vectors of gradients: the slot of each parameter, and the rows in which gradients and changes are summed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import ALIGNMENT, SharedBlock
from batchopt_workers.map.sums import Rows, rows_nbytes

CPU = torch.device("cpu")


def layout_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layout:
    return Layout.of([(f"p{i}", torch.empty(shape)) for i, shape in enumerate(shapes)], dtype)


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6))
@settings(deadline=None)
def test_slots_follow_one_another_without_gaps_and_views_share_the_memory_of_the_vector(
    shapes: list[tuple[int, ...]],
) -> None:
    layout, end = layout_of(*shapes), 0
    for i, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        assert (slot.name, slot.shape, slot.offset) == (f"p{i}", shape, end)
        assert slot.numel == torch.empty(shape).numel()
        end += slot.numel
    assert layout.size == end
    vector = torch.arange(end)
    views = layout.views(vector)
    assert [view.shape for view in views] == shapes
    assert [x for view in views for x in view.flatten().tolist()] == list(range(end))
    for view in views:
        view.fill_(-1)
    assert vector.tolist() == [-1] * end


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=50)
def test_rows_neither_overlap_nor_leave_their_bytes(size: int, changes: int, count: int, in_block: bool) -> None:
    layout = layout_of((size,))
    nbytes = rows_nbytes(layout, changes, count)
    assert nbytes == count * rows_nbytes(layout, changes, 1) and rows_nbytes(layout, changes, 0) == 0
    block = SharedBlock.create(nbytes + 64) if in_block else None
    rows = Rows(layout, changes, count, block, CPU)
    assert len(rows) == count
    for i in range(count):
        rows[i].gradient.fill_(i + 1)
        rows[i].changes.fill_(-i - 1)
    for i in range(count):
        assert rows[i].gradient.tolist() == [i + 1] * size
        assert rows[i].changes.tolist() == [-i - 1] * changes
    if block is not None:
        assert not block.tensor(torch.uint8, (64,), nbytes).any()
        if size and changes:
            assert all(t.data_ptr() % ALIGNMENT == 0 for row in rows for t in (row.gradient, row.changes))
