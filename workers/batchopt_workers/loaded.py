"""A batch that is evaluated, how it is cut, and what is kept of it between evaluations."""

from __future__ import annotations

from batchopt_workers.batch import Batch
from batchopt_workers.collation import Collation
from batchopt_workers.messages import Cut
from batchopt_workers.watch import BatchWatch


class LoadedBatch:
    """A batch and its cut. `keeps`: whether chunks are evaluated again and again."""

    def __init__(self, batch: Batch, cut: Cut | None = None, keeps: bool = True) -> None:
        self.batch, self._keeps = batch, keeps
        self.cut = cut or Cut((0,))
        self._watched: dict[int, BatchWatch] = {}  # by the first sample of the chunk
        self._collation: tuple[Cut | None, Collation] = None, Collation()

    @property
    def collation(self) -> Collation:
        """What is collated of the batch as it is cut now."""
        cut, found = self._collation
        if cut is not self.cut:
            found = Collation(self.batch.tensors(), self._keeps)
            self._collation = self.cut, found
        return found

    def watch(self, start: int, stop: int) -> BatchWatch:
        """The watch over these samples."""
        found = self._watched.get(start)
        if found is None or found.stop != stop:
            found = self._watched[start] = BatchWatch(self.batch, start, stop)
        return found
