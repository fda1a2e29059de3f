"""The loop over the chunks of an order, and what every kind of work has in common.

All work on a batch goes through `run`: f and its gradient, losses alone, functions whose results are collected or
summed; in this process, in a worker and on a node. What it guarantees:

- A chunk sees the state of the start of the step, and draws seeded by (seed, step, chunk) alone. So it does not matter
  which process evaluates it, in which order, or how often.
- What hooks change is put back before the next one; what else is left behind is looked for (`Unwritten`, `audit`).
- Its result goes to a row that nothing refers to; it counts once it is added to the sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple, Protocol

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.evaluate.chunk import LoadedBatch, Walk
from batchopt_workers.evaluate.sums import PartialSum, Report, Rows, Sums
from batchopt_workers.functions.forms import Form
from batchopt_workers.life import faults
from batchopt_workers.wire.orders import Order


class ChunkDone(NamedTuple):
    """The chunks of an order before `next` are done; they began at `began`, and took `seconds`. `results`: what the
    posthook returned for the last one, None if there is none; `form`: that of its result, if rows are written."""

    sums: Sums
    next: int
    began: float
    seconds: float  # since `began`
    drew: bool
    results: Sequence[Any] | None
    form: Form | None
    finite: bool | None = None  # whether the sums are, if that is known

    @property
    def says_nothing(self) -> bool:
        """Tell whether the posthook returned nothing but None."""
        return self.results is not None and not any(map(is_not, self.results, repeat(None)))

    def report(self) -> Report:
        """Return the report of the evaluation, valid until the next chunk is begun."""
        return Report(self.next, self.began, self.seconds, self.drew, self.sums.partials)


# The partial sum of a chunk, what the posthook returned, and the form of its result: see `ChunkDone`.
ChunkResult = tuple[PartialSum, Sequence[Any] | None, Form | None]


class Work(Protocol):
    """A kind of work, as `run` does it with one chunk after the other."""

    # Memory to sum in; None if there are no vectors to be summed.
    rows: Rows | None
    # Whether the step was seen to draw random numbers.
    drew: bool

    def do(self, pieces: Iterable[Piece], loaded: LoadedBatch, step: int, chunk: int, number: int) -> ChunkResult:
        """Do it with the pieces of a chunk, one by one (at their end what they have written is looked for), and sum in
        the row of that number."""


class EachPiece:
    """The work of calling a function for each piece, of which nothing is summed."""

    rows: Rows | None = None
    drew = False

    def __init__(self, function: Callable[[Piece], None]) -> None:
        self._function = function

    def do(self, pieces: Iterable[Piece], loaded: LoadedBatch, step: int, chunk: int, number: int) -> ChunkResult:
        """See `Work.do`."""
        for piece in pieces:
            self._function(piece)
        return PartialSum(number, (), b""), None, None


def run(walk: Walk, work: Work, loaded: LoadedBatch, order: Order, sums: Sums) -> Iterator[ChunkDone]:
    """Do this work with the chunks of `order`, one after the other.

    Rows that were merged into others are reused only when the next chunk is requested. The rows may grow from order to
    order, but must be the same for all chunks of one.
    """
    began, mode = time.perf_counter(), torch.is_grad_enabled()
    for chunk in range(order.first, order.last):
        row, failed = sums.free_row() if sums.held else 0, True
        torch._C._set_grad_enabled(True)  # as in a process of its own
        try:
            pieces = walk.pieces(loaded, order.step, chunk)
            partial, results, form = work.do(pieces, loaded, order.step, chunk, row)
            failed = False
        finally:
            torch._C._set_grad_enabled(mode)
            if failed or walk.state.statistics:
                walk.restore(loaded, failed)
        if faults.hook is not None:
            faults.point("worker.merge", chunk)
        sums.by_rows.rows, sums.by_rows.young = work.rows, row
        sums.add((0, chunk), partial)
        walk.current = range(0)
        yield ChunkDone(sums, chunk + 1, began, time.perf_counter() - began, work.drew, results, form)
