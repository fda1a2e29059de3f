"""What one worker sums of one evaluation, along the tree of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, attrgetter
from typing import NamedTuple

from batchopt_workers.messages import Report, Summary
from batchopt_workers.rows import Rows
from batchopt_workers.tree import Fold, Node


class PartialSum(NamedTuple):
    """A merged run of chunks: the row that holds its vectors, the loss of each term, and which parameters had a
    gradient."""

    row: int
    losses: tuple[float, ...]
    used: bytes


_row = attrgetter("row")


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
            if self.rows.changes:
                into.changes.add_(of.changes)
        losses = tuple(map(add, left.losses, right.losses))
        used = left.used if left.used == right.used else bytes(map(max, left.used, right.used))
        return PartialSum(young.row, losses, used)


class Sums:
    """The partials of one evaluation, in rows."""

    def __init__(self, evaluation: int, chunks: int) -> None:
        """Of so many chunks."""
        self.evaluation = evaluation
        self._merge = _RowMerge()  # an object apart: rows are given back with the last reference to these sums
        self._fold: Fold[PartialSum] = Fold(chunks, self._merge)

    def begin(self, evaluation: int) -> None:
        """Sum another evaluation of the same chunks."""
        self.evaluation = evaluation
        self._fold.held.clear()

    def free_row(self) -> int:
        """The lowest row that holds nothing that counts."""
        row, held = 0, self._fold.held
        if held:
            taken = set(map(_row, held.values()))
            while row in taken:
                row += 1
        return row

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
        self._fold.add((0, chunk), partial)

    def again(self, before: Sequence[Summary]) -> list[tuple[float, ...]] | None:
        """The losses of what is held now, if it is what these say, other losses aside; else None."""
        partials, found = self._fold.partials, []
        if len(partials) != len(before):
            return None
        for (node, partial), summary in zip(partials, before, strict=True):
            if node != summary.node or partial.row != summary.row or partial.used != summary.used:
                return None
            found.append(partial.losses)
        return found

    def report(self, done: int, began: float, seconds: float, drew: bool) -> Report:
        """The report once the chunks before `done` of the order, begun at `began`, were added."""
        summaries = tuple([Summary(node, p.row, p.losses, p.used) for node, p in self._fold.partials])
        return Report(self.evaluation, done, seconds, summaries, began, drew)
