"""All that is written and shown of a training while it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from batchopt.extending import Batches, once
from batchopt.optimizer import BatchOptimizer
from batchopt.training.moments import State
from batchopt.training.monitor import Monitor
from batchopt.training.progress import Progress
from batchopt.training.triggers import Trigger


class Log:
    """A destination of numbers. This one drops them: it is the log of a process that writes no files.

    interval: when a line is due; None: at the end of each epoch.
    """

    def __init__(self, interval: Trigger | None = None) -> None:
        self.interval = interval

    def begin(self, state: Mapping[str, Any] | None, iteration: int) -> None:
        """Start writing after an iteration, and after what was written when `state_dict` returned this state."""

    def batch(self, loss: float, iteration: int) -> None:
        """Take in the loss of a batch."""

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write a line of these numbers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the log, as plain data."""
        return {}

    def close(self) -> None:
        """Write pending entries."""


class Mean:
    """The mean of losses, weighted by samples."""

    def __init__(self) -> None:
        self._sum, self._samples = 0.0, 0

    def add(self, loss: float, samples: int) -> None:
        """Add the loss of a batch."""
        self._sum += loss * samples
        self._samples += samples

    def take(self) -> dict[str, float]:
        """Return the mean, as `loss`, if there is one, and reset it."""
        found = {"loss": self._sum / self._samples} if self._samples else {}
        self._sum, self._samples = 0.0, 0
        return found

    def state_dict(self) -> list[float]:
        """Return the sum so far, and its number of samples."""
        return [self._sum, self._samples]

    def load_state_dict(self, state: list[float]) -> None:
        """Resume from there."""
        self._sum, self._samples = state[0], int(state[1])


@dataclass
class Writing:
    """A log, the mean of losses since its last line, the state from which it resumes, and whether a line is due, as it
    is before the first batch."""

    log: Log
    mean: Mean = field(default_factory=Mean)
    state: dict[str, Any] | None = None
    due: bool = True


@dataclass
class Journal:
    """Writes to logs and the progress bar, with the numbers that nobody else has: means of losses, position, time, what
    a `Monitor` sees."""

    opt: BatchOptimizer
    batches: Batches
    logs: Sequence[Writing]
    monitor: Monitor | None
    progress: Progress
    mean: Mean = field(default_factory=Mean)  # of the epoch
    elapsed: float = 0.0  # seconds before `began`
    began: float = field(default_factory=time.monotonic)

    def begin(self, iteration: int) -> None:
        """Start, after this iteration."""
        for one in self.logs:
            one.log.begin(one.state, iteration)
        self.began = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds of the training, over all runs that resumed it."""
        return self.elapsed + time.monotonic() - self.began

    def batch(self, state: State, number: int, loss: float, samples: int) -> None:
        """Take in a finished batch, by its number in the epoch."""
        for mean in (self.mean, *(one.mean for one in self.logs)):
            mean.add(loss, samples)
        if self.monitor is not None and self.is_due(self.monitor.interval, state):
            self.monitor.look(self.opt)
        self.progress.batch(state.epoch, number, state.epoch_length, loss)
        for one in self.logs:
            one.log.batch(loss, state.iteration)

    def is_due(self, interval: Trigger | None, state: State) -> bool:
        """Ask a trigger, once after each batch; None is due at the end of an epoch."""
        if interval is None:
            return self.batches.is_new_epoch
        return once(self.opt, lambda: interval(state))

    def write_what_is_due(self, state: State) -> None:
        """Write the lines that are due after a batch; at the end of an epoch they wait for its numbers."""
        for one in self.logs:
            one.due = self.is_due(one.log.interval, state)
            if one.due and not self.batches.is_new_epoch:
                self._write(one, state, {})

    def epoch(self, state: State, numbers: Mapping[str, Any]) -> None:
        """Write the lines that are due at the end of an epoch with these numbers."""
        for one in self.logs:
            if one.due:
                self._write(one, state, numbers)
        self.progress.epoch(state.epoch, writable(numbers))

    def _write(self, one: Writing, state: State, numbers: Mapping[str, Any]) -> None:
        index, watched = self.batches.state_dict()["index"], {} if self.monitor is None else self.monitor.values
        epoch = self.batches.epoch + (index / state.epoch_length if index and state.epoch_length else 0)
        position = {"epoch": epoch, "iteration": state.iteration, "elapsed_time": self.seconds()}
        line = {**position, **learning_rate(self.opt.optimizer), **numbers, **one.mean.take(), **watched}
        one.log.write(writable(line), state.iteration)

    def parts(self) -> dict[str, Any]:
        """Return the parts that may have a state, by name."""
        parts: dict[str, Any] = {"mean": self.mean, "monitor every": self.monitor and self.monitor.interval}
        for number, one in enumerate(self.logs):
            parts |= {f"log {number} every": one.log.interval, f"log {number} mean": one.mean}
        return parts

    def resume(self, logs: Sequence[dict[str, Any]], elapsed: float) -> None:
        """Go on from the positions of as many logs; others begin anew."""
        self.elapsed = elapsed
        for one, state in zip(self.logs, logs if len(logs) == len(self.logs) else (), strict=False):
            one.state = state


def writable(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are numbers."""
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


def learning_rate(optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Return `lr` of the first parameter group, if there is one."""
    rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
    return {} if rate is None else {"lr": float(rate)}
