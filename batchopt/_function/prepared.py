"""Batches before their step: reading ahead, and normalisers of batches whose targets only workers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from batchopt._data.batches import Reading, Readings, reweighed
from batchopt._data.epochs import Batches, Turn
from batchopt._data.prefetch import to_the_end
from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt.backends.base import Backend, Prepared
from batchopt.errors import BatchoptError
from batchopt_workers.data.batch import Batch, Part
from batchopt_workers.data.items import Items
from batchopt_workers.process.messages import Cut, Kind
from batchopt_workers.tasks.task import Applied, Task

# Returns the indices of a batch's samples in the data; None if unknown.
Rows = Callable[[], Sequence[int] | None]


class Reader(Protocol):
    """Reads batches."""

    @property
    def readings(self) -> Readings:
        """The current rules for reading; the same object as long as nothing changes."""


class PreparedBatch:
    """A batch that workers can read already. It is for `step` or `load` of the optimizer that prepared it, once, before
    the next one is requested."""

    def __init__(
        self,
        owner: Reader,
        prepared: Prepared,
        readings: Readings,
        finish: Callable[[], None],
        rows: Rows = lambda: None,
    ) -> None:
        """`readings`: those it was read with. `finish`: called once the batch counts as done. `rows`: returns the
        indices of its samples in the data."""
        self.rows = rows
        self._owner, self._prepared, self._readings, self._finish = owner, prepared, readings, finish
        self._refused = ""  # why it can no longer be used
        self._finished = False

    def __repr__(self) -> str:
        return f"PreparedBatch({len(self)} samples)"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._prepared.batch.size

    def check_alone(self, targets: Any, options: Any) -> None:
        """Raise `ValueError` unless both are None."""
        if targets is not None or options is not None:
            raise ValueError("a prepared batch has its targets and options: leave `targets` and `options` out")

    def take(self, owner: Reader) -> Prepared:
        """Use the batch and return it, with the current loss. Raises `BatchoptError` if it has been used, if the next
        one was requested, or if another optimizer than `owner` prepared it."""
        reason = self._refused if owner is self._owner else "it was prepared by another BatchOptimizer"
        if reason:
            raise BatchoptError(
                f"this prepared batch cannot be used: {reason}; use each batch of opt.prepared(...) once, in the order "
                "in which they come, with the same `opt`"
            )
        self._refused = "it was used already"
        readings = owner.readings
        return self._prepared if readings is self._readings else Prepared(reweighed(self._prepared.batch, readings))

    def finish(self) -> None:
        """Mark the batch as done; a second call does nothing."""
        if not self._finished:
            self._finished = True
            self._finish()

    def expire(self) -> None:
        """Refuse the batch from now on, since its turn is over."""
        self._refused = "its turn is over"


def turns_of(batches: Iterable[Any]) -> Iterator[Turn]:
    """Return an iterator over `batches` in turns; those of `Batches` are not finished."""
    if isinstance(batches, Batches):
        return batches.turns()
    return (Turn(0, index, False, batch) for index, batch in enumerate(to_the_end(iter(batches))))


def finish(batches: Iterable[Any], turn: Turn) -> None:
    """Move the position of `Batches` past this turn; other iterables have no position."""
    if isinstance(batches, Batches):
        batches.finish(turn)


def rows_of(batches: Iterable[Any], turn: Turn) -> Sequence[int] | None:
    """Return the indices in the data of the samples of this turn's batch; None if unknown."""
    return batches.rows(turn) if isinstance(batches, Batches) else None


def whole(batches: Iterable[Any]) -> Iterable[Any]:
    """Return all of `batches`, regardless of the position."""
    return batches.whole() if isinstance(batches, Batches) else to_the_end(iter(batches))


class CarryOut(Protocol):
    """Has workers apply the function of a task to a batch, and uses their answers."""

    def __call__(self, task: Task, batch: Batch, kind: Kind, use: Callable[[Sequence[Answer], Cut], Any], /) -> Any:
        """See `BatchFunction.carry_out`."""


def with_denominators(batch: Batch, readings: Readings, carry_out: CarryOut, backend: Backend) -> Batch:
    """Return the batch with all normalisers of its means known. Raises what reading a sample raises."""
    parts = tuple(
        _known(part, number, readings[part.name], carry_out, backend) for number, part in enumerate(batch.parts)
    )
    return batch if all(one is other for one, other in zip(parts, batch.parts, strict=True)) else Batch(parts)


def _known(part: Part, number: int, reading: Reading, carry_out: CarryOut, backend: Backend) -> Part:
    function = reading.unread_denominators(part)
    if function is None:
        return part

    def whole(answers: Sequence[Answer], cut: Cut) -> torch.Tensor:
        (found,) = backend.collected(common_form(forms_of(answers), cut.bounds).columns, part.size)
        return found

    each = carry_out(Task(Applied(function), number, aside=True), Batch((part,)), Kind.COLLECT, whole)
    inputs = replace(part.inputs, denominators=function) if isinstance(part.inputs, Items) else part.inputs
    return replace(part, inputs=inputs, weighting=reading.weighting_of(each, part.size))
