"""Triggers: filters of ignite's events, `Events.ITERATION_COMPLETED(event_filter=EveryEpoch(0.5))`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ignite.engine import Engine

from batchopt.extending import Batches

# A filter of ignite's events: (engine, number of the event) -> whether it is due.
Filter = Callable[[Engine, int], bool]

# Differences of positions in an epoch below one in this many are rounding.
FINEST = 10**9


class EveryEpoch:
    """Due when the position in epochs passes a multiple of `period`: 0.5 is twice per epoch, 3 every third one.

    The position is that of `batches`, counted in samples, or else the engine's, counted in iterations. It has no state:
    after a resume it is due where it would have been. It considers the last iteration alone, so it is for events of
    iterations: at the end of an epoch it misses multiples passed before.
    """

    def __init__(self, period: float, batches: Batches | None = None) -> None:
        if isinstance(period, bool) or not isinstance(period, int | float | Fraction):
            raise TypeError(f"`period` must be a number of epochs; got {period!r}")
        if not 0 < period < math.inf:
            raise ValueError(f"`period` must be a positive number of epochs; got {period!r}")
        self._period, self._batches = _exact(period), batches

    def __call__(self, engine: Engine, event: int) -> bool:
        before, now = self._positions(engine)
        return before // self._period != now // self._period

    def _positions(self, engine: Engine) -> tuple[Fraction, Fraction]:
        if self._batches is not None:
            before = self._batches.previous_epoch_detail
            return _exact(before or 0), _exact(self._batches.epoch_detail)
        length = engine.state.epoch_length
        if length is None:
            raise ValueError("EveryEpoch needs the number of batches in an epoch, which this data does not tell")
        return (engine.state.iteration - 1) / _exact(length), engine.state.iteration / _exact(length)


def _exact(number: float | Fraction) -> Fraction:
    return Fraction(number).limit_denominator(FINEST)


class EverySeconds:
    """Due once per `period` seconds, at the first event after they have passed. The clock starts with the first event;
    `state_dict` has the elapsed time, from which it resumes."""

    def __init__(self, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        if isinstance(period, bool) or not isinstance(period, int | float):
            raise TypeError(f"`period` must be a number of seconds; got {period!r}")
        if not 0 < period < math.inf:
            raise ValueError(f"`period` must be a positive number of seconds; got {period!r}")
        self._period, self._clock = period, clock
        self._began: float | None = None
        self._counted = 0.0  # before `_began`
        self._next = period

    @property
    def _elapsed(self) -> float:
        return self._counted + (0.0 if self._began is None else self._clock() - self._began)

    def __call__(self, engine: Engine, event: int) -> bool:
        if self._began is None:
            self._began = self._clock()
        if self._elapsed < self._next:
            return False
        self._next = (self._elapsed // self._period + 1) * self._period
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the elapsed time, and the next time when it is due."""
        return {"elapsed": self._elapsed, "next": self._next}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from there."""
        self._began, self._counted, self._next = None, state["elapsed"], state["next"]


class _Watch:
    """Follows a number in `engine.state.metrics` by its name; NaN is never an improvement."""

    def __init__(self, key: str, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'; got {mode!r}")
        self.key, self.mode = key, mode
        self.best: float | None = None

    def look(self, engine: Engine) -> bool | None:
        """Tell whether the number is better than all before; None if there is none."""
        if self.key not in engine.state.metrics:
            return None
        value = float(engine.state.metrics[self.key])
        better = not math.isnan(value) and (
            self.best is None or (value > self.best if self.mode == "max" else value < self.best)
        )
        if better:
            self.best = value
        return better

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        self.best = state["best"]


class Best(_Watch):
    """Due when the number `key` of `engine.state.metrics` is better than ever before. mode: `"min"` if less is better,
    or `"max"`."""

    def __call__(self, engine: Engine, event: int) -> bool:
        return bool(self.look(engine))


class EarlyStopping(_Watch):
    """Due when the number `key` of `engine.state.metrics` has not improved for `patience` consecutive evaluations: then
    stop. Evaluations without such a number do not count."""

    def __init__(self, key: str = "loss", patience: int = 3, mode: str = "min") -> None:
        super().__init__(key, mode)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"`patience` must be an int >= 1; got {patience!r}")
        self.patience, self.count = patience, 0

    @property
    def reached(self) -> bool:
        """Tell whether it was due at the last evaluation."""
        return self.count >= self.patience

    def __call__(self, engine: Engine, event: int) -> bool:
        better = self.look(engine)
        if better is None:
            return False
        self.count = 0 if better else self.count + 1
        return self.reached

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the number of evaluations since."""
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        super().load_state_dict(state)
        self.count = state["count"]


def read_interval(name: str, every: Any) -> Filter | None:
    """Return a filter of `ITERATION_COMPLETED`: an int is a number of iterations, anything else a filter itself; None,
    the end of each epoch, is returned unchanged."""
    if every is None:
        return None
    if isinstance(every, int) and not isinstance(every, bool):
        if every < 1:
            raise ValueError(f"`{name}` must be >= 1 iterations; got {every}")
        return lambda engine, event: event % every == 0
    if not callable(every):
        raise TypeError(f"`{name}` must be a number of iterations, or a trigger such as EveryEpoch(0.5); got {every!r}")
    trigger: Filter = every
    return trigger
