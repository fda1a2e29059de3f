"""Iterating over the chunks of a loaded batch, and the pieces that are cached for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batchopt_workers.data.batch import Batch, Columns, Piece
from batchopt_workers.data.collation import Collation
from batchopt_workers.data.items import Unreadable
from batchopt_workers.data.placing import Placing
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.seeding import Draws
from batchopt_workers.map.side_effects import SideEffectWatch
from batchopt_workers.map.watch import BatchWatch, version
from batchopt_workers.process.messages import Cut
from batchopt_workers.worker import Worker


class _Recipe(NamedTuple):
    """The constant part of cutting a piece out of columns. `position`: its samples, numbered through all terms."""

    plain: Piece
    position: range

    def piece(self, batch: Batch) -> Piece:
        """Return the piece, with new tensors: user code may set their attributes."""
        plain = self.plain
        samples, part = plain.indices, batch.parts[plain.term]
        start, stop = samples.start - part.first, samples.stop - part.first
        found: list[Any] = []
        for columns in (part.inputs, part.targets):
            assert columns is None or isinstance(columns, Columns)
            data = None if columns is None else columns.data
            if columns is None or (type(data) is torch.Tensor and not data.requires_grad):
                found.append(None if data is None else data[start:stop])
            else:
                found.append(columns.slice(start, stop))
        inputs, targets = found
        return Piece(inputs, targets, plain.options, samples, plain.weight, plain.attributes.copy(), plain.term)


class Chunk:
    """Consecutive samples of a batch, and what stays the same from one of their evaluations to the next.

    `samples` are numbered through all terms; `share`: their fraction of the batch; `recipes`: of their pieces, None if
    these are cut out again each time.
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
    """A batch and its cut. `keeps`: chunks will be evaluated repeatedly, so what they need is cached."""

    def __init__(self, batch: Batch, cut: Cut | None = None, keeps: bool = True) -> None:
        self.batch, self.keeps = batch, keeps
        self.cut = cut or Cut((0,))
        self.is_of_columns = batch.is_of_columns
        self._chunks: tuple[Cut, dict[int, Chunk]] = self.cut, {}
        self._collation: tuple[Cut | None, Collation] = None, Collation()
        self._lies_on: tuple[torch.device, bool] | None = None

    def follow(self, batch: Batch) -> bool:
        """Switch to this batch if it differs in the elements of its tensors only; return whether it does."""
        ours, plain = self.batch.plain, batch.plain
        if ours is None or plain is None or not (plain.form is ours.form or plain.form == ours.form):
            return False
        self.batch, self._lies_on = batch, None
        for chunk in self._chunks[1].values():
            chunk.watch.rebind(batch)
        return True

    def lies_on(self, device: torch.device) -> bool:
        """Tell whether all tensors are there, as far as that is known before samples are read."""
        if self._lies_on is None or self._lies_on[0] != device:
            here = self.is_of_columns and all(tensor.device == device for tensor in self.batch.tensors())
            self._lies_on = device, here
        return self._lies_on[1]

    @property
    def collation(self) -> Collation:
        """The cached collation of the batch with its current cut."""
        cut, found = self._collation
        if cut is not self.cut:
            found = Collation(self.batch.tensors(), self.keeps)
            self._collation = self.cut, found
        return found

    def chunk(self, number: int) -> Chunk:
        """Return a chunk of the batch with its current cut."""
        cut, chunks = self._chunks
        if cut is not self.cut:
            chunks = {}
            self._chunks = self.cut, chunks
        found = chunks.get(number)
        if found is None:
            start, stop = self.cut.bounds[number : number + 2]
            found = chunks[number] = Chunk(self.batch, start, stop, self.keeps and self.is_of_columns)
        return found


class Walk:
    """Seeds the random state for a chunk, cuts it out, and ensures that nothing is written that another chunk reads.

    `current` is the range of samples, numbered through all terms, of the running or last forward, and `chunk` their
    chunk. `has_hooks`: hooks run. `place` brings a piece to the module's device, if it may be elsewhere; `is_mirror`:
    the module's tensors are copies there, too.

    When samples are evaluated in this process for the first time, everything that the user's code may write is compared
    with what it was; so also when a chunk moves here from another worker. What hooks may write: see `side_effects`.
    """

    def __init__(self, worker: Worker, seed: int, state: ModuleState, parameters: Sequence[torch.Tensor]) -> None:
        self.worker, self.state, self.draws = worker, state, Draws(seed)
        self.effects = SideEffectWatch(worker, state, parameters)
        self.place: Placing | None = None
        self.is_mirror = False
        self.current = range(0)
        self.chunk = -1
        self.has_hooks = False
        self.looked: set[tuple[int, int, bool, bool]] = set()  # samples, with hooks or collation, that were compared

    def pieces(self, loaded: LoadedBatch, step: int, number: int) -> Iterator[Piece]:
        """Yield the pieces of chunk `number`; after the last one was evaluated, check what they have written.

        Raise what `Constants.check` and `BatchWatch.check` raise.
        """
        chunk = loaded.chunk(number)
        watch, self.chunk = chunk.watch, number
        draws, effects = self.draws, self.effects
        if draws.seeds or draws.looks:
            draws.begin(step, number)
        self.current = chunk.samples  # while samples are cut out and collated
        reads_batch = loaded.keeps or self.has_hooks or loaded.batch.collates  # else a task, which is given copies
        key = chunk.samples.start, chunk.samples.stop, self.has_hooks, reads_batch
        looks = effects.compares = key not in self.looked
        watch.versions, watch.contents = [*map(version, watch.counted)], []
        if looks:
            if reads_batch:
                watch.look(mapped=effects.protected)
            if not self.is_mirror:
                self.state.constants.compare()
        elif self.has_hooks:
            effects.note()
        if torch._C._is_any_autocast_enabled():
            torch.clear_autocast_cache()  # X may have changed under the casts of its parameters
        if chunk.recipes is None or (self.place is not None and not loaded.lies_on(self.worker.device)):
            yield from self._cut_out(loaded, chunk.samples)
        else:
            for recipe in chunk.recipes:
                self.current = recipe.position
                yield recipe.piece(loaded.batch)
                if effects.undo:
                    effects.put_back()
        self.current = chunk.samples
        if looks or [*map(version, watch.counted)] != watch.versions:
            watch.check()
        if self.has_hooks and not looks:
            effects.check()
        constants = self.state.constants
        if constants.held or constants.examines or [*map(version, constants.counted)] != constants.begun:
            constants.check()
        if looks:
            self.looked.add(key)

    def _cut_out(self, loaded: LoadedBatch, samples: range) -> Iterator[Piece]:
        """Yield the pieces of these samples, newly cut out and collated, or as cached."""
        numbering, collation = loaded.batch.numbering, loaded.collation
        try:
            pieces = loaded.batch.pieces(samples.start, samples.stop, collation)
            for piece in pieces if self.place is None else map(self.place, pieces):
                self.current = numbering.position(piece.term, piece.indices)
                yield piece
                if self.effects.undo:
                    self.effects.put_back()
                self.current = range(self.current.stop, samples.stop)
        except Unreadable as error:  # an item of the next term
            term, _ = next(numbering.split(self.current))
            self.current = numbering.position(term, range(error.index, error.index + 1))
            raise error.error from None
        collation.check()

    def restore(self, loaded: LoadedBatch, failed: bool) -> None:
        """Clean up after a chunk: the module's state is then that of the start of the step; `failed`: an exception was
        raised."""
        try:
            if failed:
                loaded.collation.forget()
                self.state.constants.put_back()
        finally:
            if self.effects.undo:
                self.effects.put_back()
            self.state.restore()
