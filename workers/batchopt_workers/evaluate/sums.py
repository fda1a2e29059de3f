"""The accumulators of a worker: gradients are collected in them, and summed along the tree of chunks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import add, attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchopt_workers.evaluate.tree import Fold, Node
from batchopt_workers.life import faults
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.memory import GrowingFile, SharedBlock, aligned

Array = npt.NDArray[Any]


class Row(NamedTuple):
    """One partial sum: `gradient` (shape `(layout.size,)`), its `views` in each parameter's shape, and `changes`
    (float64) of the buffers that evaluation may change. In memory that processes share also the `losses` of the terms
    (float64), and for each parameter whether it is `used` (uint8), as they were when the row was reported."""

    gradient: torch.Tensor
    views: list[torch.Tensor]
    changes: torch.Tensor
    losses: Array
    used: Array


class Rows(list[Row]):
    """`count` rows over a block of shared memory or, without a block, over memory of this process. Each has `changes`
    numbers for the changes of buffers, and the losses of `terms` terms."""

    def __init__(
        self,
        layout: Layout,
        changes: int,
        count: int,
        block: SharedBlock | None = None,
        device: torch.device | None = None,
        terms: int = 0,
    ) -> None:
        super().__init__()
        self._layout, self.changes, self._terms, self._device = layout, changes, terms, device
        self.grow(count, block)

    def grow(self, count: int, block: SharedBlock | None) -> None:
        """Add `count` rows over `block`: all or, if interrupted, none. Existing rows keep their places."""
        layout, changes, terms = self._layout, self.changes, self._terms
        rows: list[Row] = []
        (to_changes, to_losses, to_used), stride = _places(layout, changes, terms)
        for at in range(0, count * stride, stride):
            if block is None:
                gradient = torch.empty(layout.size, dtype=layout.sum_dtype, device=self._device or "cpu")
                deltas = torch.empty(changes, dtype=torch.float64, device="cpu")
                rows.append(Row(gradient, layout.views(gradient), deltas, _NONE, _NONE))
                continue
            gradient = block.tensor(layout.sum_dtype, (layout.size,), at)
            deltas = block.tensor(torch.float64, (changes,), at + to_changes)
            losses = block.tensor(torch.float64, (terms,), at + to_losses).numpy()
            used = block.tensor(torch.uint8, (len(layout.slots),), at + to_used).numpy()
            rows.append(Row(gradient, layout.views(gradient), deltas, losses, used))
        self.extend(rows)

    def cut(self, count: int) -> None:
        """Keep the first `count` rows."""
        del self[count:]


_NONE: Array = np.empty(0)


def _places(layout: Layout, changes: int, terms: int) -> tuple[tuple[int, int, int], int]:
    """Return the bytes in a row at which the parts after the gradient begin, and all its bytes."""
    sizes = layout.size * layout.sum_dtype.itemsize, 8 * changes, 8 * terms, len(layout.slots)
    *starts, nbytes = accumulate(map(aligned, sizes))
    return (starts[0], starts[1], starts[2]), nbytes


def rows_nbytes(layout: Layout, changes: int, count: int, terms: int = 0) -> int:
    """Return the bytes of a block for `count` rows."""
    return _places(layout, changes, terms)[1] * count


class PartialSum(NamedTuple):
    """A merged run of chunks: the row with its vectors, the loss of each term, and which parameters had a gradient.
    Losses on a card are tensors until they are read (`Sums.settle`): it goes on meanwhile."""

    row: int
    losses: tuple[Any, ...]
    used: bytes


class Report(NamedTuple):
    """The state of a worker after a chunk of an order: the chunks before `next` are done, in `seconds` since the order
    came, at `began` on the worker's `time.perf_counter`; `partials` are all that it holds of this evaluation, including
    those of earlier orders. They are valid until the next chunk is begun: then a row that is in no partial any more may
    be overwritten. `drew`: whether a forward of this step was seen to draw random numbers."""

    next: int
    began: float
    seconds: float
    drew: bool
    partials: Sequence[tuple[Node, PartialSum]]


_row = attrgetter("row")


class RowMerge:
    """Sums two partials in the row of the younger one, which was not reported; so reported rows stay unchanged until
    the next report."""

    def __init__(self) -> None:
        self.rows: Rows | None = None  # None if there are no vectors to be summed
        self.young = -1  # the row of the last chunk

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


class Sums(Fold[PartialSum]):
    """The partials of one evaluation, in rows."""

    def __init__(self, evaluation: int, chunks: int) -> None:
        """`chunks`: the number of chunks."""
        self.evaluation = evaluation
        self.by_rows = RowMerge()  # a separate object: rows are released with the last reference to these sums
        super().__init__(chunks, self.by_rows)

    def free_row(self) -> int:
        """Return the lowest row that is not in use."""
        row, taken = 0, set(map(_row, self.held.values()))
        while row in taken:
            row += 1
        return row

    def settle(self, rows: Rows | None) -> bool | None:
        """Read the losses of the partials held, all in one transfer, for which all work before is waited for. Return
        whether these and the vectors in `rows` are finite; None if it is not known."""
        held = self.held
        losses = [loss for partial in held.values() for loss in partial.losses]
        waiting = [loss for loss in losses if isinstance(loss, torch.Tensor)]
        if not waiting:
            return None
        sums = [] if rows is None else [rows[partial.row].gradient.sum().double() for partial in held.values()]
        numbers = torch.stack([*waiting, *sums]).tolist()
        found = iter(numbers)
        for node, partial in held.items():
            settled = tuple([next(found) if isinstance(loss, torch.Tensor) else loss for loss in partial.losses])
            held[node] = partial._replace(losses=settled)
        return all(map(math.isfinite, numbers)) or None  # a sum may overflow where no element does


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
        self._rows, self._layout = Rows(layout, 0, count, self._block), layout
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
    first: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    more: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for i, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if faults.hook is not None:
            faults.point("worker.collect", chunk)
        parameter.grad = None
        views, gradients = more if used[i] else first
        views.append(row.views[i])
        gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        used[i] = 1
    views, gradients = first
    if weight != 1.0 and row.gradient.is_cpu:
        for view, gradient in zip(views, gradients, strict=True):
            if gradient.dtype == view.dtype:
                torch.mul(gradient, weight, out=view)  # passes over memory once
            else:
                view.copy_(gradient).mul_(weight)
    elif views:  # by one call: on a card a kernel for each parameter would be more than the work
        torch._foreach_copy_(views, gradients)
        if weight != 1.0:
            torch._foreach_mul_(views, weight)
    if more[0]:
        torch._foreach_add_(*more, alpha=weight)


def is_large(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether `collecting` is worthwhile."""
    return parameters[0].is_cpu and sum(parameter.numel() for parameter in parameters) >= LARGE


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


class GradsKept:
    """Clears all `.grad` for the body, and restores them afterwards. Not a generator: then Python 3.10 keeps the
    frames, and the memory that they sum in, of a task after whose last chunk nobody asks for another, until it looks
    for cycles."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters, self._before = parameters, [parameter.grad for parameter in parameters]

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(self, *_: object) -> None:
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            parameter.grad = grad
