"""What a mean divides by, where only workers read the targets: one pass over the samples finds it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from batchopt._data.batches import Reading, Readings
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.results import common_form, forms_of
from batchopt.backends.base import Backend
from batchopt_workers.batch import Batch, Part
from batchopt_workers.items import Items
from batchopt_workers.messages import Cut, Kind
from batchopt_workers.task import Applied, Task


class CarryOut(Protocol):
    """Has workers apply the function of a task to a batch, and uses their answers."""

    def __call__(self, task: Task, batch: Batch, kind: Kind, use: Callable[[Sequence[Answer], Cut], Any], /) -> Any:
        """See `BatchFunction.carry_out`."""


def with_denominators(batch: Batch, readings: Readings, carry_out: CarryOut, backend: Backend) -> Batch:
    """The same batch, if all that its means divide by is known, else one in which it is. Raises what reading a sample
    raises."""
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
