"""What callbacks of `fit` are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ignite.engine import Engine

from batchopt._data import arguments
from batchopt.optimizer import BatchOptimizer


@dataclass(frozen=True)
class Moment:
    """Where a training is.

    `epoch` is the present epoch, or the one that has just ended, from 1 on; 0 before the first. `batch` is the number
    of the batch in its epoch, or in the evaluation, from 1 on; 0 where it is about a whole epoch. `iteration` counts
    batches in all epochs. `numbers` has what there is: `loss` of the batch, or the mean of the epoch, and metrics.
    `output` is the loss, or `(outputs, targets)` of a batch of the evaluation. `trainer` is the engine:
    `trainer.terminate()` stops.
    """

    epoch: int
    batch: int
    iteration: int
    numbers: Mapping[str, Any]
    output: Any
    opt: BatchOptimizer
    trainer: Engine


Callback = Callable[[Moment], Any]


def read_callbacks(name: str, given: Any) -> tuple[Callback, ...]:
    """One callback, or several. Raises `TypeError`."""
    callbacks = tuple(given) if isinstance(given, Iterable) else (given,)
    for callback in callbacks:
        if callback is None:
            raise TypeError(f"`{name}` must be a function of a Moment, or a list of such; got None")
        arguments.check_callable(name, callback, ("moment",))
    return callbacks
