"""The accumulators of a worker: gradients are collected in them, and summed along the tree of chunks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import add, attrgetter
from typing import NamedTuple

import torch

from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import GrowingFile, SharedBlock, aligned
from batchopt_workers.map.tree import Fold, Node
from batchopt_workers.process import faults
from batchopt_workers.process.messages import Report, Summary


class Row(NamedTuple):
    """One partial sum: `gradient` (shape `(layout.size,)`), its `views` in each parameter's shape, and `changes`
    (float64) of the buffers that evaluation may change."""

    gradient: torch.Tensor
    views: list[torch.Tensor]
    changes: torch.Tensor


class Rows(list[Row]):
    """`count` rows over a block of shared memory or, without a block, over memory of this process. Each has `changes`
    numbers for the changes of buffers."""

    def __init__(
        self, layout: Layout, changes: int, count: int, block: SharedBlock | None, device: torch.device
    ) -> None:
        super().__init__()
        self._layout, self.changes, self._device = layout, changes, device
        self.grow(count, block)

    def grow(self, count: int, block: SharedBlock | None) -> None:
        """Add `count` rows over `block`: all or, if interrupted, none. Existing rows keep their places."""
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
    """Return the bytes of a block for `count` rows."""
    return _row_bytes(layout, changes)[0] * count


class PartialSum(NamedTuple):
    """A merged run of chunks: the row with its vectors, the loss of each term, and which parameters had a gradient."""

    row: int
    losses: tuple[float, ...]
    used: bytes


_row = attrgetter("row")


class _RowMerge:
    """Sums two partials in the row of the younger one, which was not reported; so reported rows stay unchanged until
    the next report."""

    def __init__(self) -> None:
        self.rows: Rows | None = None  # of the last chunk added; `young` is its row
        self.young = -1

    def __call__(self, left: PartialSum, right: PartialSum) -> PartialSum:
        young, old = (right, left) if right.row == self.young else (left, right)
        if self.rows is not None:
            into, of = self.rows[young.row], self.rows[old.row]
            into.gradient.add_(of.gradient)
            if self.rows.changes:
                into.changes.add_(of.changes)
        losses = tuple(map(add, left.losses, right.losses))
        used = left.used if left.used == right.used else bytes(map(max, left.used, right.used))
        return PartialSum(young.row, losses, used)


class Sums:
    """The partials of one evaluation, in rows."""

    def __init__(self, evaluation: int, chunks: int) -> None:
        """`chunks`: the number of chunks."""
        self.evaluation = evaluation
        self._merge = _RowMerge()  # a separate object: rows are released with the last reference to these sums
        self._fold: Fold[PartialSum] = Fold(chunks, self._merge)

    def begin(self, evaluation: int) -> None:
        """Start another evaluation of the same chunks."""
        self.evaluation = evaluation
        self._fold.held.clear()

    def free_row(self) -> int:
        """Return the lowest row that is not in use."""
        row, held = 0, self._fold.held
        if held:
            taken = set(map(_row, held.values()))
            while row in taken:
                row += 1
        return row

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The places in the tree of the partials held."""
        return tuple(node for node, _ in self._fold.partials)

    @property
    def root(self) -> PartialSum:
        """The sum of all chunks. Raises `LookupError` while some are missing."""
        return self._fold.root

    def add(self, chunk: int, partial: PartialSum, rows: Rows | None) -> None:
        """Add the partial of a chunk; without `rows` if there are no vectors to be summed."""
        self._merge.rows, self._merge.young = rows, partial.row
        self._fold.add((0, chunk), partial)

    def again(self, before: Sequence[Summary]) -> list[tuple[float, ...]] | None:
        """Return the losses of the partials held now, if these equal `before` except for the losses; else None."""
        partials, found = self._fold.partials, []
        if len(partials) != len(before):
            return None
        for (node, partial), summary in zip(partials, before, strict=True):
            if node != summary.node or partial.row != summary.row or partial.used != summary.used:
                return None
            found.append(partial.losses)
        return found

    def report(self, done: int, began: float, seconds: float, drew: bool) -> Report:
        """Return the report once the chunks before `done` of the order, begun at `began`, were added."""
        summaries = tuple([Summary(node, p.row, p.losses, p.used) for node, p in self._fold.partials])
        return Report(self.evaluation, done, seconds, summaries, began, drew)


class SharedTotals:
    """Rows in a file that grows with the results; the process that made the file maps the reported rows."""

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor."""
        self._file = GrowingFile(fd)
        self._block: SharedBlock | None = None
        self._rows: Rows | None = None
        self._layout: Layout | None = None

    def rows(self, layout: Layout, count: int) -> Rows:
        """See `Totals`. Raise `MemoryError`."""
        if self._rows is not None and self._layout == layout and len(self._rows) >= count:
            return self._rows
        nbytes = rows_nbytes(layout, 0, count)
        if self._block is None or self._block.nbytes < nbytes:
            self._file.lengthen(nbytes)
            self._block = SharedBlock(os.dup(self._file.fd))
            self._block.release()
        self._rows, self._layout = Rows(layout, 0, count, self._block, torch.device("cpu")), layout
        return self._rows


# Total elements of all gradients from which each one is collected as soon as it exists: they would no longer be in the
# processor's cache at the end of the backward.
LARGE = 2**18


def collect(
    parameters: Iterable[tuple[int, torch.Tensor]], row: Row, weight: float, used: bytearray, chunk: int
) -> None:
    """Add the gradients of these parameters (each given with its index) times `weight` to a row, in the row's
    precision, which is at least single, and clear them. Call it in a backward, or with gradients disabled.

    A first gradient overwrites the row: cheaper than zeroing the row and accumulating there.
    """
    views = row.views
    for i, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if faults.hook is not None:
            faults.point("worker.collect", chunk)
        parameter.grad = None
        view = views[i]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if used[i]:
            view.add_(gradient, alpha=weight)
        elif weight == 1.0:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, weight, out=view)
        else:
            view.copy_(gradient).mul_(weight)
        used[i] = 1


def is_large(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether `collecting` is worthwhile."""
    return sum(parameter.numel() for parameter in parameters) >= LARGE


@contextmanager
def collecting(
    parameters: Sequence[torch.Tensor], row: Row, weight: float, used: bytearray, chunk: int
) -> Iterator[None]:
    """`collect` each gradient as soon as the backward in the body has made it, which frees its memory for the next
    one."""
    handles = []
    try:
        for i, parameter in enumerate(parameters):
            if parameter.requires_grad and not getattr(parameter, "_post_accumulate_grad_hooks", None):  # the user's
                handles.append(
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda made, i=i: collect(((i, made),), row, weight, used, chunk)
                    )
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def grads_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Clear all `.grad` for the body, and restore them afterwards."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
