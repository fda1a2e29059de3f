"""What one worker sums of one evaluation, along the tree of chunks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import add

from batchopt_workers.messages import Report, Summary
from batchopt_workers.rows import Rows
from batchopt_workers.tree import Fold, Node


@dataclass(frozen=True)
class PartialSum:
    """A merged run of chunks: the row that holds its vectors, the loss of each term, and which parameters had a
    gradient."""

    row: int
    losses: tuple[float, ...]
    used: bytes


class _RowMerge:
    """Sums two partials in the row of the younger one, which nobody was told of; so whatever was reported stays as it
    is until something else is reported."""

    def __init__(self) -> None:
        self.rows: Rows | None = None  # of the chunk that was added last, with its row
        self.young = -1

    def __call__(self, left: PartialSum, right: PartialSum) -> PartialSum:
        young, old = (right, left) if right.row == self.young else (left, right)
        if self.rows is not None:
            into, of = self.rows[young.row], self.rows[old.row]
            into.gradient.add_(of.gradient)
            into.changes.add_(of.changes)
        losses = tuple(map(add, left.losses, right.losses))
        return PartialSum(young.row, losses, bytes(map(max, left.used, right.used)))


class Sums:
    """The partials of one evaluation, in rows."""

    def __init__(self, evaluation: int, chunks: int, top: int | None = None) -> None:
        """Of so many chunks, merged up to level `top` of their tree, if that is given."""
        self.evaluation = evaluation
        self._merge = _RowMerge()  # an object apart: rows are given back with the last reference to these sums
        self._fold: Fold[PartialSum] = Fold(chunks, self._merge, top)

    def free_row(self) -> int:
        """The lowest row that holds nothing that counts."""
        taken = {partial.row for _, partial in self._fold.partials}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The places in the tree of what is held."""
        return tuple(node for node, _ in self._fold.partials)

    @property
    def root(self) -> PartialSum:
        """The sum of all chunks. Raises `LookupError` while some are missing."""
        return self._fold.root

    def add(self, chunk: int, partial: PartialSum, rows: Rows | None) -> None:
        """Take in the partial of a chunk; without `rows`, where there is no vector to be summed."""
        self._merge.rows, self._merge.young = rows, partial.row
        self._fold.add(Node(0, chunk), partial)

    def report(self, done: int, began: float, drew: bool) -> Report:
        """The report once the chunks before `done` of the order, begun at `began`, were added."""
        summaries = tuple(Summary(node, p.row, p.losses, p.used) for node, p in self._fold.partials)
        return Report(self.evaluation, done, time.perf_counter() - began, summaries, began, drew)
