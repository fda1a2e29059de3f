"""Triggers: functions of the `State` of a training that tell whether something is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from batchopt.extending import Batches, check_callable, read_count, read_positive
from batchopt.training.moments import State

# Called once after each batch.
Trigger = Callable[[State], bool]

# Differences of positions in an epoch below one in this many are rounding.
FINEST = 10**9


class EveryEpoch:
    """Due when the position in epochs passes a multiple of `period`: 0.5 is twice per epoch, 3 every third one.

    The position is that of `batches`, counted in samples, or else the training's, counted in batches. It has no state:
    after a resume it is due where it would have been. Raises `ValueError` where the data does not tell the number of
    batches in an epoch.
    """

    def __init__(self, period: float, batches: Batches | None = None) -> None:
        read_positive("period", period, "number of epochs")
        self._period, self._batches = _exact(period), batches

    @property
    def is_of_whole_epochs(self) -> bool:
        """Tell whether it is due at ends of epochs alone."""
        return self._batches is None and self._period.denominator == 1

    def __call__(self, state: State) -> bool:
        if self._batches is not None:
            before, now = _exact(self._batches.previous_epoch_detail or 0), _exact(self._batches.epoch_detail)
        elif state.epoch_length is not None:
            length = _exact(state.epoch_length)
            before, now = (state.iteration - 1) / length, state.iteration / length
        else:
            raise ValueError("EveryEpoch needs the number of batches in an epoch, which this data does not tell")
        return before // self._period != now // self._period


def _exact(number: float | Fraction) -> Fraction:
    return Fraction(number).limit_denominator(FINEST)


class EverySeconds:
    """Due once per `period` seconds, after the first batch at which they have passed. The clock starts with the first
    batch; `state_dict` has the seconds that are left, so that it resumes."""

    def __init__(self, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period, self._clock = read_positive("period", period, "number of seconds"), clock
        self._left = self._period  # seconds when the clock starts
        self._next: float | None = None

    def __call__(self, state: State) -> bool:
        now = self._clock()
        if self._next is None:
            self._next = now + self._left
        if now < self._next:
            return False
        self._next += ((now - self._next) // self._period + 1) * self._period
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the seconds that are left until it is due."""
        return {"left": self._left if self._next is None else self._next - self._clock()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from there."""
        self._left, self._next = state["left"], None


class EarlyStopping:
    """Due at the end of an epoch when the number `key` of `State.metrics` has not improved for `patience` consecutive
    evaluations: then stop. Epochs without such a number do not count; NaN is never an improvement. mode: `"min"` if
    less is better, or `"max"`."""

    def __init__(self, key: str = "loss", patience: int = 3, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'; got {mode!r}")
        self.key, self.patience, self._sign = key, read_count("patience", patience), 1 if mode == "max" else -1
        self.best: float | None = None
        self.count = 0  # evaluations since

    @property
    def reached(self) -> bool:
        """Tell whether it was due at the last evaluation."""
        return self.count >= self.patience

    def __call__(self, state: State) -> bool:
        if self.key not in state.metrics:
            return False
        value, best = float(state.metrics[self.key]), self.best
        is_better = not math.isnan(value) if best is None else self._sign * value > self._sign * best
        self.best, self.count = (value, 0) if is_better else (best, self.count + 1)
        return self.reached

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the number of evaluations since."""
        return {"best": self.best, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        self.best, self.count = state["best"], state["count"]


def read_interval(name: str, every: Any) -> Trigger | None:
    """Return a trigger: an int is a number of iterations, anything else a trigger itself; None, the end of each epoch,
    is returned unchanged."""
    if isinstance(every, int):
        count = read_count(name, every)
        return lambda state: state.iteration % count == 0
    if every is not None and not callable(every):
        raise TypeError(f"`{name}` must be a number of iterations, or a trigger such as EveryEpoch(0.5); got {every!r}")
    check_callable(name, every, ("state",))
    trigger: Trigger | None = every
    return trigger
