"""The parts of a training in their order: the actions after each batch and each epoch."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from ignite.engine import Engine, Events

from batchopt.extending import (
    Batches,
    Observer,
    PreparedBatch,
    ProgressBar,
    check_callable,
    observe,
    once,
    report,
    verbosity,
)
from batchopt.ignite.checkpoint import Checkpoint
from batchopt.ignite.monitor import Monitor
from batchopt.ignite.schedule import Schedule
from batchopt.ignite.trainer import Trainer, length_of
from batchopt.ignite.triggers import EarlyStopping, Filter
from batchopt.optimizer import BatchOptimizer

logger = logging.getLogger("batchopt")


class Log(Protocol):
    """A destination of numbers: at the end of each epoch, or when `interval` is due."""

    interval: Filter | None

    def begin(self, state: Mapping[str, Any] | None, iteration: int) -> None:
        """Start writing before an iteration; after what was written when `state_dict` returned this state."""
        return

    def batch(self, loss: float, iteration: int) -> None:
        """Record a finished batch."""
        return

    def write(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write these numbers."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the log, as plain data."""

    def close(self) -> None:
        """Write pending entries."""
        return


@dataclass
class Parts:
    """The parts of a training; `evaluator` runs over `eval_data` every `score_every` epochs."""

    epochs: int
    evaluator: Engine | None = None
    eval_data: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    score_every: int = 1
    on_batch: Sequence[Callback] = ()
    on_epoch: Sequence[Callback] = ()
    on_eval_batch: Sequence[Callback] = ()
    on_eval: Sequence[Callback] = ()
    monitor: Monitor | None = None
    schedule: Schedule | None = None
    checkpoint: Checkpoint | None = None
    logs: Sequence[Log] = ()
    stopping: EarlyStopping | None = None
    epoch_0: bool = False
    time_limit: float | None = None
    progress: Progress = field(default_factory=lambda: Progress(0, 0))


class Clock:
    """The seconds of a training, over all runs that resumed it."""

    def __init__(self) -> None:
        self._elapsed, self._began = 0.0, time.monotonic()

    def start(self, elapsed: float | None = None) -> None:
        """Go on now, from so many seconds or those counted before."""
        self._elapsed, self._began = self._elapsed if elapsed is None else elapsed, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._elapsed + time.monotonic() - self._began


@dataclass
class Writing:
    """A log, the mean of losses since its last line, the state from which it resumes, and whether it is due at the end
    of the epoch."""

    log: Log
    mean: Mean
    state: dict[str, Any] | None = None
    due: bool = False


class Loop:
    """Runs the parts at the events of a trainer."""

    def __init__(self, opt: BatchOptimizer, trainer: Trainer, batches: Batches, parts: Parts) -> None:
        self._opt, self._trainer, self._batches, self._parts = opt, trainer, batches, parts
        self._clock, self._mean = Clock(), Mean()
        self._logs = [Writing(log, Mean()) for log in parts.logs]
        self._stops = self._saves = False  # the latter: at the end of the epoch
        self._closed = batches.epoch  # epochs whose end has been handled
        self._saved: int | None = None  # the iteration of the last checkpoint
        self._number = self._index  # of the last batch in its epoch

    def attach(self) -> None:
        """Attach to the events of the trainer and the evaluator."""
        limit = self._parts.time_limit
        if limit is not None:
            self._trainer.time_left = lambda: max(limit - self._clock.seconds(), 1e-9)
        add = self._trainer.add_event_handler
        add(Events.STARTED, self._started)
        add(Events.EPOCH_STARTED, self._epoch_begins)
        add(Events.ITERATION_STARTED, self._batch_begins)
        add(Events.ITERATION_COMPLETED, self._batch_done)
        add(Events.EPOCH_COMPLETED, self._epoch_done)
        add(Events.COMPLETED, self._save_the_end)
        if self._parts.evaluator is not None:
            self._parts.evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._eval_batch_done)

    # ---- events

    def _started(self) -> None:
        iteration = self._trainer.state.iteration
        for one in self._logs:
            one.log.begin(one.state, iteration)
        self._clock.start()
        if self._parts.epoch_0 and iteration == 0:
            numbers = self._evaluated()
            self._trainer.state.metrics = numbers
            for one in self._logs:
                self._write(one, numbers)
            self._parts.progress.epoch(0, writable(numbers))
            self._call(self._parts.on_epoch, 0, numbers, None)
            self._stop_if_asked()

    def _epoch_begins(self) -> None:
        self._number = self._index
        if self._parts.schedule is not None and self._parts.schedule.by == "epoch" and not self._index:
            self._parts.schedule.before(self._trainer)

    def _batch_begins(self) -> None:
        if self._parts.schedule is not None and self._parts.schedule.by == "batch":
            self._parts.schedule.before(self._trainer)

    def _batch_done(self) -> None:
        parts, state = self._parts, self._trainer.state
        if self._opt.paused:
            self._stops, self._saved = True, None
            self._stop_if_asked()
            return
        batch, loss, ended = cast(PreparedBatch, state.batch), cast(float, state.output), self._batches.is_new_epoch
        number = self._count(ended)
        for mean in (self._mean, *(one.mean for one in self._logs)):
            mean.add(loss, len(batch))
        if parts.schedule is not None and parts.schedule.by == "batch":
            parts.schedule.after({"loss": loss})
        if parts.monitor is not None and self._is_due(parts.monitor.interval, ended):
            parts.monitor.look(self._opt)
        self._parts.progress.batch(state.epoch, number, length_of(self._batches), loss)
        for log in parts.logs:
            log.batch(loss, state.iteration)
        self._call(parts.on_batch, number, {"loss": loss}, loss)
        self._write_and_save_what_is_due(ended)
        self._stops = self._stops or self._opt.stopped is not None
        self._stop_if_asked(at_the_end=ended)

    def _epoch_done(self) -> None:
        parts, epoch = self._parts, self._trainer.state.epoch
        numbers: dict[str, Any] = dict(self._mean.take())
        if epoch % parts.score_every == 0:
            numbers |= self._evaluated()
        self._trainer.state.metrics = numbers
        if parts.schedule is not None and parts.schedule.by == "epoch":
            parts.schedule.after(numbers)
        if parts.stopping is not None and parts.stopping(self._trainer, epoch):
            self._stops = True
        for one in self._logs:
            if one.due:
                self._write(one, numbers)
                one.due = False
        self._parts.progress.epoch(epoch, writable(numbers))
        self._call(parts.on_epoch, 0, numbers, None)
        self._closed = self._batches.epoch
        if self._saves or (parts.checkpoint is not None and parts.checkpoint.score in numbers):
            self._save(numbers)
        self._saves = False
        self._stop_if_asked()

    def _save_the_end(self) -> None:
        is_done_with = not self._batches.is_new_epoch or self._closed == self._batches.epoch
        if self._saved != self._trainer.state.iteration and is_done_with:
            self._save({})

    def _eval_batch_done(self, evaluator: Engine) -> None:
        self._call(self._parts.on_eval_batch, evaluator.state.iteration, {}, evaluator.state.output)

    # ---- actions

    @property
    def _index(self) -> int:
        return self._batches.state_dict()["index"]

    def _count(self, ended: bool) -> int:
        """Return the number of the finished batch in its epoch, from 1 on."""
        self._number = self._number + 1 if ended else self._index
        return self._number

    def _is_due(self, interval: Filter | None, ended: bool) -> bool:
        if interval is None:
            return ended
        return once(self._opt, lambda: interval(self._trainer, self._trainer.state.iteration))

    def _write_and_save_what_is_due(self, ended: bool) -> None:
        """Write and save what is due; at the end of an epoch this is deferred, to include its numbers."""
        for one in self._logs:
            if self._is_due(one.log.interval, ended):
                one.due = ended
                if not ended:
                    self._write(one, {})
        checkpoint = self._parts.checkpoint
        if checkpoint is not None and self._is_due(checkpoint.interval, ended):
            self._saves = ended
            if not ended:
                self._save({})

    def _write(self, one: Writing, numbers: Mapping[str, Any]) -> None:
        state, monitor, mean = self._trainer.state, self._parts.monitor, one.mean.take()
        position = {"epoch": self._epochs(), "iteration": state.iteration, "elapsed_time": self._clock.seconds()}
        watched = {} if monitor is None else monitor.values
        line = {**position, **learning_rate(self._opt.optimizer), **numbers, **mean, **watched}
        one.log.write(writable(line), state.iteration)

    def _epochs(self) -> float:
        """Return the number of finished epochs, plus the finished fraction of the current one."""
        if self._index == 0:
            return self._batches.epoch
        length = self._trainer.state.epoch_length
        return self._batches.epoch + (self._index / length if length else 0)

    def _evaluated(self) -> dict[str, Any]:
        parts = self._parts
        if parts.evaluator is None:
            return dict(self._opt.score(self._batches, parts.metrics)) if parts.metrics else {}
        found = parts.evaluator.run(parts.eval_data).metrics
        numbers = {f"eval_{name}": found[name] for name in parts.metrics}
        self._call(parts.on_eval, 0, numbers, None)
        return numbers

    def _call(self, callbacks: Sequence[Callback], batch: int, numbers: Mapping[str, Any], output: Any) -> None:
        if callbacks:
            state = self._trainer.state
            moment = Moment(state.epoch, batch, state.iteration, numbers, output, self._opt, self._trainer)
            for callback in callbacks:
                if callback(moment) is True:
                    self._stops = True

    def _stop_if_asked(self, at_the_end: bool = False) -> None:
        """Stop if requested; after an epoch's last batch, only once its end is handled, which ignite would skip."""
        self._stops = self._stops or bool(self._trainer.should_terminate)
        if self._stops:
            self._trainer.should_terminate = not at_the_end

    # ---- checkpoints

    def _save(self, numbers: Mapping[str, Any]) -> None:
        if self._parts.checkpoint is not None:
            iteration = self._saved = self._trainer.state.iteration
            self._parts.checkpoint.save(self._opt, iteration, self.state_dict(), numbers)

    def _named(self) -> dict[str, Any]:
        """Return the parts that have a state, except the batches and the logs."""
        parts = self._parts
        intervals = {
            "checkpoint every": parts.checkpoint and parts.checkpoint.interval,
            "monitor every": parts.monitor and parts.monitor.interval,
            **{f"log {number} every": one.log.interval for number, one in enumerate(self._logs)},
        }
        found = {"scheduler": parts.schedule, "stopping": parts.stopping, "mean": self._mean, **intervals}
        found |= {f"log {number} mean": one.mean for number, one in enumerate(self._logs)}
        return {name: part for name, part in found.items() if hasattr(part, "state_dict")}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training, as plain data."""
        state = self._trainer.state
        return {
            "batches": self._batches.state_dict(),
            "engine": {"iteration": state.iteration, "epoch": state.epoch, "epoch_length": state.epoch_length},
            "parts": {name: part.state_dict() for name, part in self._named().items()},
            "logs": [one.log.state_dict() for one in self._logs],
            "elapsed": self._clock.seconds(),
            "numbers": writable(self._trainer.state.metrics),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there. Raises `ValueError`, and changes nothing, for another data set or another scheduler."""
        named = self._named()
        if ("scheduler" in named) != ("scheduler" in state["parts"]):
            there = "with" if "scheduler" in state["parts"] else "without"
            raise ValueError(f"it was written {there} a scheduler: give fit() the same `scheduler`")
        if self._parts.schedule is not None:
            self._parts.schedule.check(state["parts"]["scheduler"])
        self._batches.load_state_dict(state["batches"])
        for name, part in named.items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        same = len(state["logs"]) == len(self._logs)
        for number, one in enumerate(self._logs):
            one.state = state["logs"][number] if same else {"position": 0}
        self._clock.start(state["elapsed"])
        self._trainer.state.epoch_length = state["engine"]["epoch_length"]
        self._trainer.state.metrics = dict(state["numbers"])
        self._saved = state["engine"]["iteration"]
        self._closed = self._batches.epoch

    @property
    def is_over(self) -> bool:
        """Tell whether early stopping has ended the training."""
        return self._parts.stopping is not None and self._parts.stopping.reached


@dataclass(frozen=True)
class Moment:
    """The position of a training, for callbacks.

    `epoch` is the current epoch, or the one that has just ended, from 1 on; 0 before the first. `batch` is the number
    of the batch in its epoch, or in the evaluation, from 1 on; 0 for events of an epoch. `iteration` counts batches
    over all epochs. `numbers` has the available numbers: `loss` of the batch, or the mean of the epoch, and metrics.
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
    """Return the given callback, or several, as a tuple. Raises `TypeError`."""
    callbacks = tuple(given) if isinstance(given, Iterable) else (given,)
    for callback in callbacks:
        if callback is None:
            raise TypeError(f"`{name}` must be a function of a Moment, or a list of such; got None")
        check_callable(name, callback, ("moment",))
    return callbacks


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


def writable(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are numbers."""
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


def learning_rate(optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Return `lr` of the first parameter group, if there is one."""
    rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
    return {} if rate is None else {"lr": float(rate)}


class Progress(Observer):
    """Shows progress, by `verbose`: 1: a bar for each epoch. 2 and 3: a log record for each epoch, with its numbers."""

    def __init__(self, verbose: int, epochs: int) -> None:
        self._verbose, self._epochs = verbose, epochs
        self._bar: ProgressBar | None = None

    def decided(self, message: str) -> None:
        """Say it beside the bar."""
        ProgressBar.write(f"batchopt: {message}", file=sys.stderr)

    def batch(self, epoch: int, batch: int, batches: int | None, loss: float) -> None:
        """Show the finished batch with this number in its epoch, out of `batches`."""
        if self._verbose != 1:
            return
        if self._bar is None:
            title = f"epoch {epoch}/{self._epochs}"
            self._bar = ProgressBar(desc=title, total=batches, initial=batch - 1, unit=" batches", dynamic_ncols=True)
        self._bar.set_postfix_str(f"loss {loss:.6g}", refresh=False)
        self._bar.update()

    def epoch(self, epoch: int, numbers: Mapping[str, Any]) -> None:
        """Show the end of an epoch."""
        text = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=True)
        self.close()
        if self._verbose >= 2:
            logger.info("epoch %d/%d: %s", epoch, self._epochs, text)

    def close(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextmanager
def progress(opt: BatchOptimizer, epochs: int) -> Iterator[Progress]:
    """Show the progress of `opt`, in place of its own bar."""
    verbose = verbosity(opt)
    shown = Progress(verbose, epochs)
    try:
        if verbose != 1:
            yield shown
            return
        report(opt, 0)
        with observe(opt, shown):
            yield shown
    finally:
        report(opt, verbose)
        shown.close()
