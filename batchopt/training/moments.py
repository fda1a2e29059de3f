"""The position of a training, as triggers and callbacks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchopt.extending import check_callable
from batchopt.optimizer import BatchOptimizer


@dataclass
class State:
    """The position of a training: returned by `fit`, and passed to triggers.

    `epoch` is the current epoch, or the one that has just ended, from 1 on; 0 before the first. `iteration` counts
    batches over all epochs; `epoch_length` is their number in one, None where the data does not tell. `metrics` has the
    numbers at the end of the last epoch: the mean `loss`, and metrics.
    """

    epoch: int = 0
    iteration: int = 0
    epoch_length: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """The position of a training, passed to callbacks.

    `epoch` and `iteration` are those of `State`. `batch` is the number of the batch in its epoch, or in the evaluation,
    from 1 on; 0 for events of an epoch. `numbers` has the available numbers: `loss` of the batch, or the mean of the
    epoch, and metrics. `output` is the loss, or `(outputs, targets)` of a batch of the evaluation. `opt` is the
    `BatchOptimizer`.
    """

    epoch: int
    batch: int
    iteration: int
    numbers: Mapping[str, Any]
    output: Any
    opt: BatchOptimizer


# One that returns True stops the training.
Callback = Callable[[Moment], Any]


def read_callbacks(**given: Any) -> dict[str, tuple[Callback, ...]]:
    """Return the callbacks of each name, given as one or several. Raises `TypeError`."""
    found = {name: tuple(one) if isinstance(one, Iterable) else (one,) for name, one in given.items()}
    for name, callbacks in found.items():
        for callback in callbacks:
            if callback is None:
                raise TypeError(f"`{name}` must be a function of a Moment, or a list of such; got None")
            check_callable(name, callback, ("moment",))
    return found
