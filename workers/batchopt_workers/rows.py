"""A worker's accumulators: each row holds a gradient sum, then the changes of the module's buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchopt_workers.layout import Layout
from batchopt_workers.memory import SharedBlock, aligned


class Row(NamedTuple):
    """One partial sum: `gradient` (shape `(layout.size,)`), its `views` in each parameter's shape, and
    `changes`, float64, of the buffers that evaluation may change."""

    gradient: torch.Tensor
    views: list[torch.Tensor]
    changes: torch.Tensor


class Rows(list[Row]):
    """`count` rows over a block of shared memory, or over memory of this process where there is no block. Each has
    `changes` numbers for the changes of buffers."""

    def __init__(
        self, layout: Layout, changes: int, count: int, block: SharedBlock | None, device: torch.device
    ) -> None:
        super().__init__()
        self._layout, self.changes, self._device = layout, changes, device
        self.grow(count, block)

    def grow(self, count: int, block: SharedBlock | None) -> None:
        """Add `count` rows over `block`, all or, if that is interrupted, none; those there keep their places."""
        layout, changes = self._layout, self.changes
        rows: list[Row] = []
        stride, split = _row_bytes(layout, changes)
        for i in range(count):
            if block is None:
                gradient = torch.empty(layout.size, dtype=layout.sum_dtype, device=self._device)
                deltas = torch.empty(changes, dtype=torch.float64, device="cpu")
            else:
                gradient = block.tensor(layout.sum_dtype, (layout.size,), i * stride)
                deltas = block.tensor(torch.float64, (changes,), i * stride + split)
            rows.append(Row(gradient, layout.views(gradient), deltas))
        self.extend(rows)

    def cut(self, count: int) -> None:
        """Keep the first `count` rows."""
        del self[count:]


def _row_bytes(layout: Layout, changes: int) -> tuple[int, int]:
    split = aligned(layout.size * layout.sum_dtype.itemsize)
    return split + aligned(changes * 8), split


def rows_nbytes(layout: Layout, changes: int, count: int) -> int:
    """Bytes of a block for `count` rows."""
    return _row_bytes(layout, changes)[0] * count
