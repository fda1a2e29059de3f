"""Finds the samples that a loss or gradient that is not finite came from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from batchopt._function.counters import Counters
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import all_finite
from batchopt._mapreduce.split import runs, split_batch
from batchopt.backends.base import Backend
from batchopt.errors import NonFiniteError, WorkerError
from batchopt_workers.messages import Cut, Kind, Order
from batchopt_workers.numbering import Numbering

# What orders of each kind yield beside the loss.
DERIVATIVES = {Kind.EVALUATE: "gradient", Kind.MULTIPLY: "Hessian-vector product"}


@dataclass(frozen=True)
class Origin:
    """The first chunk that is not finite, the fewest of its samples that are not finite by themselves, and which of
    the loss and its derivative it is."""

    chunk: int
    samples: range
    what: str


def explain(
    backend: Backend,
    cut: Cut,
    numbering: Numbering,
    number: Callable[[], int],
    counters: Counters,
    kind: Kind = Kind.EVALUATE,
    name: str = "",
) -> NonFiniteError:
    """The error for the evaluation, or the product, that follows `counters`: evaluates anew, without hooks (which the
    caller has taken off), to find the place. `number` numbers the evaluations; `name`: of what it yields beside the
    loss, if that is not what the kind says."""
    name = name or DERIVATIVES[kind]
    place = locate(backend, cut, number, counters.steps, kind, name)
    beside = "" if kind is Kind.TOTAL else "loss or "
    what = place.what if place is not None else f"{beside}{name} is not finite"
    chunk, samples = (place.chunk, place.samples) if place is not None else (None, range(0))
    return NonFiniteError(what, chunk, samples, counters.steps, counters.evaluations + 1, numbering.within(samples))


def locate(
    backend: Backend,
    cut: Cut,
    number: Callable[[], int],
    step: int,
    kind: Kind = Kind.EVALUATE,
    name: str = DERIVATIVES[Kind.EVALUATE],
) -> Origin | None:
    """Evaluate halves of the chunks, then halves of the first bad chunk's samples.

    None if each chunk is finite: a hook did it, or their sum is too large for the dtype.
    """

    def what(cut: Cut, some: range) -> str:
        counts = split_batch(len(some), [1.0] * len(backend.workers))
        evaluation = number()
        orders = [
            Order(evaluation, step, some.start + first, some.start + last, kind) if last > first else None
            for first, last in runs(counts)
        ]
        return next(filter(None, (_what(answer, name) for answer in backend.evaluate(cut, orders))), "")

    def is_nothing(chunk: int) -> bool:
        """Whether its loss is finite as soon as the samples of the chunk beside it are with its own."""
        first = max(chunk - 1, 0)
        try:
            return cut.chunks > 1 and not what(Cut((cut.bounds[first], cut.bounds[first + 2])), range(1))
        except WorkerError:  # there is no room for both
            return False

    chunks = _narrow(range(cut.chunks), lambda some: what(cut, some))
    reason = what(cut, chunks)
    if not reason or len(chunks) > 1:
        return None
    samples = range(*cut.bounds[chunks.start : chunks.stop + 1])

    def what_of_samples(some: range) -> str:
        try:
            return what(Cut((some.start, some.stop)), range(1))
        except WorkerError:  # the module cannot evaluate so few samples
            return ""

    found = _narrow(samples, what_of_samples)
    if kind is Kind.EVALUATE and reason == "loss is nan" and is_nothing(chunks.start):
        reason += (
            " (and finite together with the chunk beside it: a mean over nothing, as of targets that are all ignored, "
            "needs `denominators`, what each sample adds to what it divides by)"
        )
    return Origin(chunks.start, found, reason)


def _narrow(items: range, what: Callable[[range], str]) -> range:
    """The half that is not finite by itself, as long as there is one."""
    while len(items) > 1:
        middle = (items.start + items.stop) // 2
        halves = range(items.start, middle), range(middle, items.stop)
        bad = next((half for half in halves if what(half)), None)
        if bad is None:
            return items
        items = bad
    return items


def _what(answer: Answer, name: str) -> str:
    """Which of the loss and its derivative is not finite; empty if both are."""
    for _, partial in answer.partials:
        bad = next((loss for loss in partial.losses if not math.isfinite(loss)), None)
        if bad is not None:
            return f"loss is {bad}"
        if not all_finite(partial.gradient):
            return f"{name} is not finite"
    return ""
