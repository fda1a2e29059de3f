"""Finding where a loss or a gradient that is not finite came from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from batchopt.backends import Answer, Backend
from batchopt.errors import NonFiniteError, WorkerError
from batchopt.history import History
from batchopt.plan import Plan
from batchopt_workers.messages import Cut, Order


@dataclass(frozen=True)
class Place:
    """The first chunk that is not finite, the fewest of its samples that are not finite by themselves, and which of
    loss and gradient it is."""

    chunk: int
    samples: range
    what: str


def is_finite(loss: float, gradient: torch.Tensor) -> bool:
    """Whether both are. A sum is finite if its terms are, but for an overflow, so one cheap pass mostly is enough."""
    if not math.isfinite(loss):
        return False
    return math.isfinite(gradient.sum().item()) or bool(gradient.isfinite().all())


def explain(backend: Backend, plan: Plan, order: int, history: History) -> NonFiniteError:
    """The error for the evaluation that follows `history`: evaluates anew, without hooks (which the caller has taken
    off), to find the place."""
    place = locate(backend, plan, order, history.steps)
    what = place.what if place is not None else "loss or gradient is not finite"
    chunk, samples = (place.chunk, place.samples) if place is not None else (None, range(0))
    return NonFiniteError(what, chunk, samples, history.steps, history.evaluations + 1)


def locate(backend: Backend, plan: Plan, evaluation: int, step: int) -> Place | None:
    """Evaluate the chunks one by one, without hooks, then halves of the first bad one.

    None if each chunk is finite: a hook did it, or their sum is too large for the dtype.
    """
    orders = plan.orders(evaluation, step)
    bad: list[tuple[int, str]] = []
    for turn in range(max(plan.shares)):
        singles = [
            Order(evaluation, step, order.first + turn, order.first + turn + 1)
            if order is not None and order.first + turn < order.last
            else None
            for order in orders
        ]
        for answer in backend.evaluate(plan.cut, singles):
            what = _what(answer)
            if what:
                bad.append((answer.order.first, what))
    if not bad:
        return None
    chunk, what = min(bad)
    start, stop = plan.cut.bounds[chunk], plan.cut.bounds[chunk + 1]
    return Place(chunk, _narrow(backend, range(start, stop), evaluation, step), what)


def _narrow(backend: Backend, samples: range, evaluation: int, step: int) -> range:
    """The half that is not finite by itself, as long as there is one."""
    idle = [None] * (len(backend.workers) - 1)
    while len(samples) > 1:
        middle = (samples.start + samples.stop) // 2
        for half in (range(samples.start, middle), range(middle, samples.stop)):
            try:
                (answer,) = backend.evaluate(Cut((half.start, half.stop)), [Order(evaluation, step, 0, 1), *idle])
            except WorkerError:  # the module cannot evaluate so few samples
                return samples
            if _what(answer):
                samples = half
                break
        else:
            return samples
    return samples


def _what(answer: Answer) -> str:
    """Which of loss and gradient is not finite; empty if both are."""
    for _, partial in answer.partials:
        if not math.isfinite(partial.loss):
            return f"loss is {partial.loss}"
        if not is_finite(partial.loss, partial.gradient):
            return "gradient is not finite"
    return ""
