"""A batch that is evaluated, how it is cut, and what is kept of it between evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batchopt_workers.batch import Batch, Columns, Piece
from batchopt_workers.collation import Collation
from batchopt_workers.messages import Cut
from batchopt_workers.watch import BatchWatch


class _Recipe(NamedTuple):
    """How a piece of columns is cut out: what does not change between two evaluations. `position`: of its samples,
    numbered through all terms."""

    plain: Piece
    position: range

    def piece(self, batch: Batch) -> Piece:
        """The piece, of new tensors: user code may set their attributes."""
        plain = self.plain
        samples, part = plain.indices, batch.parts[plain.term]
        found: list[Any] = []
        for columns in (part.inputs, part.targets):
            assert columns is None or isinstance(columns, Columns)
            data = None if columns is None else columns.data
            if columns is None or (type(data) is torch.Tensor and not data.requires_grad):
                found.append(None if data is None else data[samples.start : samples.stop])
            else:
                found.append(columns.slice(samples.start, samples.stop))
        inputs, targets = found
        return Piece(inputs, targets, plain.options, samples, plain.weight, plain.attributes.copy(), plain.term)


class Chunk:
    """Consecutive samples of a batch, and what does not change from one evaluation of them to the next.

    `samples` are numbered through all terms; `share`: how much of the batch they are; `recipes`: of their pieces, None
    where these are cut out anew each time.
    """

    def __init__(self, batch: Batch, start: int, stop: int, keeps: bool) -> None:
        self.samples, self.share = range(start, stop), (stop - start) / batch.size
        self.watch = BatchWatch(batch, self.samples)
        self.recipes: list[_Recipe] | None = None
        if keeps:
            place = batch.numbering.position
            pieces = batch.pieces(start, stop)
            self.recipes = [
                _Recipe(replace(piece, inputs=None, targets=None), place(piece.term, piece.indices)) for piece in pieces
            ]


class LoadedBatch:
    """A batch and its cut. `keeps`: whether chunks are evaluated again and again."""

    def __init__(self, batch: Batch, cut: Cut | None = None, keeps: bool = True) -> None:
        self.batch, self._keeps = batch, keeps
        self.cut = cut or Cut((0,))
        self.is_of_columns = batch.is_of_columns
        self._chunks: tuple[Cut, dict[int, Chunk]] = self.cut, {}
        self._collation: tuple[Cut | None, Collation] = None, Collation()

    def follow(self, batch: Batch) -> bool:
        """Be this batch, if it differs in the elements of its tensors alone; returns whether it does."""
        ours, plain = self.batch.plain, batch.plain
        if ours is None or plain is None or not (plain.form is ours.form or plain.form == ours.form):
            return False
        self.batch = batch
        for chunk in self._chunks[1].values():
            chunk.watch.follow(batch)
        return True

    @property
    def collation(self) -> Collation:
        """What is collated of the batch as it is cut now."""
        cut, found = self._collation
        if cut is not self.cut:
            found = Collation(self.batch.tensors(), self._keeps)
            self._collation = self.cut, found
        return found

    def chunk(self, number: int) -> Chunk:
        """A chunk of the batch as it is cut now."""
        cut, chunks = self._chunks
        if cut is not self.cut:
            chunks = {}
            self._chunks = self.cut, chunks
        found = chunks.get(number)
        if found is None:
            start, stop = self.cut.bounds[number : number + 2]
            found = chunks[number] = Chunk(self.batch, start, stop, self._keeps and self.is_of_columns)
        return found
