"""Iterating over the chunks of a loaded batch, and the pieces that are cached for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from batchopt_workers.batch.batch import Batch, Columns, Piece
from batchopt_workers.batch.collation import Collation
from batchopt_workers.batch.items import Unreadable
from batchopt_workers.batch.placing import Placing
from batchopt_workers.evaluate.draws import Draws
from batchopt_workers.evaluate.program import Worker
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.evaluate.unwritten import Unwritten, samples, version
from batchopt_workers.watch.record import Record, Undo
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.structures import tensors_in

T = TypeVar("T")


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
                is_whole = data is not None and start == 0 and stop == len(data)  # a slice takes four times as long
                found.append(None if data is None else data.detach() if is_whole else data[start:stop])
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
        # what it is read from, unless one watches all tensors of the batch
        self.data = None if batch.plain is not None else samples(_held(batch, self.samples), batch)
        self.recipes: list[_Recipe] | None = None
        if keeps:
            place = batch.numbering.position
            pieces = batch.pieces(start, stop)
            self.recipes = [
                _Recipe(replace(piece, inputs=None, targets=None), place(piece.term, piece.indices)) for piece in pieces
            ]


def _held(batch: Batch, rows: range) -> Iterator[torch.Tensor]:
    """Yield the tensors from which these samples are read."""
    for term, own in batch.numbering.split(rows):
        part = batch.parts[term]
        for form in (part.inputs, part.targets):
            if form is not None:
                yield from tensors_in(form.held(own.start - part.first, own.stop - part.first))


class LoadedBatch:
    """A batch and its cut. `keeps`: chunks will be evaluated repeatedly, so what they need is cached."""

    def __init__(self, batch: Batch, cut: Cut | None = None, keeps: bool = True) -> None:
        self.batch, self.keeps = batch, keeps
        self.is_of_columns = batch.is_of_columns
        self.data = None if batch.plain is None else samples(batch.plain.tensors, batch)
        self.cut_into(cut or Cut((0,)))
        self._lies_on: tuple[torch.device, bool] | None = None

    def follow(self, batch: Batch) -> bool:
        """Switch to this batch if it differs in the elements of its tensors only; return whether it does."""
        ours, plain = self.batch.plain, batch.plain
        if ours is None or plain is None or not (plain.form is ours.form or plain.form == ours.form):
            return False
        self.batch, self._lies_on = batch, None
        self.data = samples(plain.tensors, batch)
        return True

    def lies_on(self, device: torch.device) -> bool:
        """Tell whether all tensors are there, as far as that is known before samples are read."""
        if self._lies_on is None or self._lies_on[0] != device:
            here = self.is_of_columns and all(tensor.device == device for tensor in self.batch.tensors())
            self._lies_on = device, here
        return self._lies_on[1]

    def cut_into(self, cut: Cut) -> None:
        """Use this `cut`, and forget what was cached for chunks: the `chunks` themselves, by number, as far as they
        were asked for, and their `collation`."""
        self.cut, self.collation = cut, Collation(self.keeps)
        self.chunks: dict[int, Chunk] = {}

    def chunk(self, number: int) -> Chunk:
        """Return a chunk of the batch with its current cut."""
        found = self.chunks.get(number)
        if found is None:
            start, stop = self.cut.bounds[number : number + 2]
            found = self.chunks[number] = Chunk(self.batch, start, stop, self.keeps and self.is_of_columns)
        return found


class Walk:
    """Seeds the random state for a chunk, cuts it out, and takes back what hooks have changed for it.

    `current` is the range of samples, numbered through all terms, of the running or last forward, and `chunk` their
    chunk. `constants` are the tensors of the program that no chunk may write. `runs_others`: hooks run, or a function
    of the user. `place` brings a piece to the module's device, if it may be elsewhere.
    """

    def __init__(self, worker: Worker, seed: int, state: ModuleState, constants: Unwritten) -> None:
        self.worker, self.state, self.constants, self.draws = worker, state, constants, Draws(seed)
        self.place: Placing | None = None
        self.current = range(0)
        self.chunk, self._step = -1, 0
        self.runs_others = False
        self._contents: Record | None = None
        self._undo: list[Undo] = []

    def pieces(self, loaded: LoadedBatch, step: int, number: int) -> Iterator[Piece]:
        """Yield the pieces of chunk `number`; after the last one was evaluated, check what they have written.

        Raise what `Unwritten.refuse` raises.
        """
        chunk = loaded.chunks.get(number) or loaded.chunk(number)
        self.chunk, self._step = number, step
        self.draws.others = self.runs_others or not loaded.is_of_columns
        self.draws.begin(step, number)
        self.current = chunk.samples  # while samples are cut out and collated
        data = chunk.data or loaded.data
        assert data is not None  # one of the two
        unwritten = data, self.constants
        for one in unwritten:
            one.begun = [*map(version, one.tensors)]
        if torch._C._is_any_autocast_enabled():
            torch.clear_autocast_cache()  # X may have changed under the casts of its parameters
        if chunk.recipes is None or (self.place is not None and not loaded.lies_on(self.worker.device)):
            yield from self._cut_out(loaded, chunk.samples)
        else:
            for recipe in chunk.recipes:
                self.current = recipe.position
                yield recipe.piece(loaded.batch)
                if self._undo:
                    self.put_back()
        self.current = chunk.samples
        for one in unwritten:
            if [*map(version, one.tensors)] != one.begun:
                one.refuse()

    def _cut_out(self, loaded: LoadedBatch, samples: range) -> Iterator[Piece]:
        """Yield the pieces of these samples, newly cut out and collated, or as cached. What a collate function or a
        dataset draws is not part of the forward's draws, which are the same whether it is called or not."""
        numbering, collation, is_made = loaded.batch.numbering, loaded.collation, not loaded.is_of_columns
        try:
            pieces = loaded.batch.pieces(samples.start, samples.stop, collation)
            for piece in pieces if self.place is None else map(self.place, pieces):
                self.current = numbering.position(piece.term, piece.indices)
                if is_made and not loaded.batch.parts[piece.term].one_by_one:
                    self.draws.begin(self._step, self.chunk, 1 + piece.term)
                yield piece
                self.put_back()
                self.current = range(self.current.stop, samples.stop)
        except Unreadable as error:  # an item of the next term
            term, _ = next(numbering.split(self.current))
            self.current = numbering.position(term, range(error.index, error.index + 1))
            raise error.error from None
        collation.check()

    # ---- the attributes of module and criterion

    def undoable(self, function: Callable[[], T]) -> T:
        """Return what a hook or a function of the user returns; `put_back` undoes what it changes there."""
        contents, worker = self._contents, self.worker
        if contents is None or not contents.looks_the_same():
            contents = Record({"module": worker.module, "criterion": worker.criterion}, functions=False)
            self._contents = contents
        try:
            return function()
        finally:
            if not contents.looks_the_same():
                self._undo += contents.changes()

    def put_back(self) -> None:
        """Undo what hooks or functions have changed."""
        while self._undo:
            self._undo.pop()()

    def restore(self, loaded: LoadedBatch, failed: bool) -> None:
        """Clean up after a chunk: the module's state is then that of the start of the step; `failed`: an exception was
        raised."""
        if failed:
            loaded.collation.forget()
        self.put_back()
        self.state.restore()
