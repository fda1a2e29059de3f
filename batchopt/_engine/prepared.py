"""Batches before their step: reading ahead, and normalisers of batches whose targets only workers read."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from batchopt._data.batches import BatchSpecs, reweighed
from batchopt._data.epochs import Batches, EpochBatch
from batchopt._data.prefetch import Ahead, as_arguments, as_batch_of_terms, to_the_end
from batchopt._engine.evaluating import Evaluating
from batchopt._engine.observer import Observer
from batchopt._engine.step import Indices
from batchopt._machine.cores import torch_threads
from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt.backends.base import Prepared
from batchopt.errors import BatchoptError
from batchopt_workers.batch.batch import Batch, Part
from batchopt_workers.batch.items import Items
from batchopt_workers.functions.task import Applied, Task
from batchopt_workers.wire.orders import Cut, Kind


class PreparedBatch:
    """A batch that workers can read already. It is for `step` or `load` of the optimizer that prepared it, once, before
    the next one is requested."""

    def __init__(self, owner: Evaluating, prepared: Prepared, specs: BatchSpecs, source: Any, turn: EpochBatch) -> None:
        """`specs`: those it was read with. `source`: the batches of which it is this `turn`."""
        self._owner, self._prepared, self._specs = owner, prepared, specs
        self._batches, self._turn = source if isinstance(source, Batches) else None, turn
        # the indices of its samples in the data; a function that does not refer to this, which a step would keep
        self.rows: Indices = (lambda: None) if self._batches is None else partial(self._batches.rows, turn)
        self._refused = ""  # why it can no longer be used
        self._finished = False
        self.is_last = False  # the step on it was stopped, and with it the loop

    def __repr__(self) -> str:
        return f"PreparedBatch({len(self)} samples)"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._prepared.batch.size

    def check_alone(self, targets: Any, options: Any) -> None:
        """Raise `ValueError` unless both are None."""
        if targets is not None or options is not None:
            raise ValueError("a prepared batch has its targets and options: leave `targets` and `options` out")

    def take(self, owner: Evaluating) -> Prepared:
        """Use the batch and return it, with the current loss. Raises `BatchoptError` if it has been used, if the next
        one was requested, or if another optimizer than `owner` prepared it."""
        reason = self._refused if owner is self._owner else "it was prepared by another BatchOptimizer"
        if reason:
            raise BatchoptError(
                f"this prepared batch cannot be used: {reason}; use each batch of prepared(opt, ...) once, in the "
                "order in which they come, with the same `opt`"
            )
        self._refused = "it was used already"
        specs = owner.specs
        return self._prepared if specs is self._specs else Prepared(reweighed(self._prepared.batch, specs))

    def finish(self) -> None:
        """Mark the batch as done, which moves the position of `Batches` past it; a second call does nothing."""
        if not self._finished:
            self._finished = True
            if self._batches is not None:
                self._batches.finish(self._turn)

    def expire(self) -> None:
        """Refuse the batch from now on, since its turn is over."""
        self._refused = "its turn is over"


class ReadsAhead(Observer):
    """Fetches the next batch while the workers compute."""

    def __init__(self, ahead: Ahead[Any]) -> None:
        self._ahead = ahead

    def busy(self) -> None:
        with torch_threads(1):  # the workers have the cores
            self._ahead.fetch()


def prepared(
    engine: Evaluating, batches: Iterable[Any], convert: Callable[[Any], Any] | None = None
) -> Generator[PreparedBatch, None, None]:
    """Yield each of `batches`, converted and prepared; the next one is read and prepared while the workers compute."""
    read = as_arguments if engine.reader.terms is None else as_batch_of_terms

    def prepare(turn: EpochBatch) -> tuple[EpochBatch, Prepared, BatchSpecs]:
        specs = engine.specs
        batch = turn.batch if convert is None else convert(turn.batch)
        return turn, engine.prepare_ahead(*read(batch)), specs

    began, ahead = time.perf_counter(), Ahead(_turns_of(batches), prepare)
    for turn, found, specs in ahead:
        batch = PreparedBatch(engine, found, specs, batches, turn)
        engine.waited(time.perf_counter() - began)
        with engine.observers.including(ReadsAhead(ahead)):
            try:
                yield batch
            finally:
                batch.expire()
        if batch.is_last:
            return
        began = time.perf_counter()
        batch.finish()


def _turns_of(batches: Iterable[Any]) -> Iterator[EpochBatch]:
    """Return an iterator over `batches` in turns; those of `Batches` are not finished."""
    if isinstance(batches, Batches):
        return batches.turns()
    return (EpochBatch(0, index, False, batch) for index, batch in enumerate(to_the_end(iter(batches))))


def whole(batches: Iterable[Any], convert: Callable[[Any], Any] | None = None) -> Iterable[Any]:
    """Return all of `batches`, converted, regardless of the position."""
    found = batches.whole() if isinstance(batches, Batches) else to_the_end(iter(batches))
    return found if convert is None else (convert(batch) for batch in found)  # no map(): see PEP 479


def with_denominators(engine: Evaluating, batch: Batch, run_task: Callable[..., torch.Tensor]) -> Batch:
    """Return the batch with all normalisers of its means known; `run_task` is that of the engine. Raises what reading
    a sample raises."""
    specs = engine.specs

    def known(part: Part, number: int) -> Part:
        spec = specs[part.name]
        function = spec.unread_denominators(part)
        if function is None:
            return part

        def whole(answers: Sequence[Answer], cut: Cut) -> torch.Tensor:
            form = common_form(forms_of(answers), cut.bounds)
            (found,) = engine.workers.backend.collected(form.columns, part.size)
            return found

        each = run_task(Task(Applied(function), number, aside=True), Batch((part,)), Kind.COLLECT, whole)
        inputs = replace(part.inputs, denominators=function) if isinstance(part.inputs, Items) else part.inputs
        return replace(part, inputs=inputs, weighting=spec.weighting_of(each, part.size))

    parts = tuple(known(part, number) for number, part in enumerate(batch.parts))
    return batch if all(one is other for one, other in zip(parts, batch.parts, strict=True)) else Batch(parts)
