"""The loop of a training, and its parts in their order."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from batchopt.extending import Batches, LoaderSource, PreparedBatch, prepared, scored
from batchopt.optimizer import BatchOptimizer
from batchopt.training.checkpoint import Checkpoint, own_of
from batchopt.training.journal import Journal, writable
from batchopt.training.moments import Callback, Moment, State
from batchopt.training.schedule import Schedule, check
from batchopt.training.triggers import EarlyStopping


@dataclass(frozen=True)
class Validation:
    """The metrics of `data`, each `every` epochs, if asked for also before the `first`; without `data` those of the
    training data."""

    data: Any
    metrics: Mapping[str, Any]
    every: int
    first: bool


@dataclass
class Training:
    """A training: its parts, and the order in which they act."""

    opt: BatchOptimizer
    batches: Batches
    epochs: int
    validation: Validation
    callbacks: Mapping[str, Sequence[Callback]]
    journal: Journal
    schedule: Schedule | None
    checkpoint: Checkpoint | None
    stopping: EarlyStopping | None
    time_limit: float | None
    state: State
    stops: bool = False
    saved: int | None = None  # the iteration of the last checkpoint

    def run(self) -> State:
        """Train from the position of the batches until `epochs` are complete, or something stops it."""
        state, batches = self.state, self.batches
        state.epoch, state.iteration = batches.epoch, batches.iteration
        if batches.epoch >= self.epochs or (self.stopping is not None and self.stopping.reached):
            return state
        self.journal.begin(state.iteration)
        if self.validation.first and state.iteration == 0:
            self._close_epoch(self._validated())
        while batches.epoch < self.epochs and not self.stops:
            self._epoch()
        if self.saved != state.iteration:
            self._save_the_end()
        return state

    def _epoch(self) -> None:
        """Make the steps that are left of an epoch; unless it is left before, do what is due at its end."""
        opt, batches, state, limit = self.opt, self.batches, self.state, self.time_limit
        optimizer: Any = opt.optimizer
        state.epoch, number = batches.epoch + 1, batches.state_dict()["index"]
        if not number and hasattr(optimizer, "begin_pass"):  # SVRG's snapshots
            optimizer.begin_pass(lambda: opt.full_gradient(batches))
        with closing(cast(Generator[PreparedBatch, None, None], prepared(opt, batches))) as ahead:
            for batch in ahead:
                left = None if limit is None else max(limit - self.journal.seconds(), 1e-9)
                loss = opt.step(batch, time_limit=left)
                if opt.paused:  # the batch does not count: a run that resumes makes the rest of its step
                    self.stops, self.saved = True, None
                    return
                number, state.iteration = number + 1, state.iteration + 1
                saves = self._batch_done(number, loss, len(batch))
                if self.stops and not batches.is_new_epoch:
                    return
        self._epoch_done(saves)

    def _batch_done(self, number: int, loss: float, samples: int) -> bool:
        """Do what is due after a batch, by its number in the epoch; return whether a checkpoint is."""
        if self.schedule is not None and self.schedule.by == "batch":
            self.schedule.step({"loss": loss})
        self.journal.batch(self.state, number, loss, samples)
        self._call("on_batch", number, {"loss": loss}, loss)
        self.journal.write_what_is_due(self.state)
        saves = self.checkpoint is not None and self.journal.is_due(self.checkpoint.interval, self.state)
        if saves and not self.batches.is_new_epoch:
            self._save({})
        self.stops |= self.opt.stopped is not None
        return saves

    def _epoch_done(self, saves: bool) -> None:
        numbers: dict[str, Any] = dict(self.journal.mean.take())
        if self.state.epoch % self.validation.every == 0:
            numbers |= self._validated()
        self.state.metrics = numbers
        if self.schedule is not None and self.schedule.by == "epoch":
            self.schedule.step(numbers)
        self.stops |= self.stopping is not None and self.stopping(self.state)
        self._close_epoch(numbers)
        if saves or (self.checkpoint is not None and self.checkpoint.score in numbers):
            self._save(numbers)

    def _close_epoch(self, numbers: dict[str, Any]) -> None:
        """Tell logs and callbacks the numbers of an epoch, or those from before the first one."""
        self.state.metrics = numbers
        self.journal.epoch(self.state, numbers)
        self._call("on_epoch", 0, numbers, None)

    def _validated(self) -> dict[str, Any]:
        data, metrics = self.validation.data, self.validation.metrics
        if data is None:
            return dict(self.opt.score(self.batches, metrics)) if metrics else {}
        scoring = scored(self.opt, data, metrics)
        for number, batch in enumerate(scoring, 1):
            self._call("on_eval_batch", number, {}, (batch.outputs, batch.targets))
        numbers = {f"eval_{name}": value for name, value in scoring.values.items()}
        self._call("on_eval", 0, numbers, None)
        return numbers

    def _call(self, name: str, batch: int, numbers: Mapping[str, Any], output: Any) -> None:
        moment = Moment(self.state.epoch, batch, self.state.iteration, numbers, output, self.opt)
        for callback in self.callbacks[name]:
            self.stops |= callback(moment) is True

    # ---- checkpoints

    def _save(self, numbers: Mapping[str, Any]) -> None:
        if self.checkpoint is not None:
            self.saved = self.state.iteration
            self.checkpoint.save(self.opt, self.saved, self.state_dict(), numbers)

    def _save_the_end(self) -> None:
        is_within = self.batches.state_dict()["index"] > 0 or self.opt.paused
        if self.checkpoint is not None and is_within and isinstance(self.batches.source, LoaderSource):
            what = "the run ended within an epoch of a loader, where it cannot be resumed, and is not saved there"
            warnings.warn(f"{what}; Batches(dataset, batch_size, shuffle=True) can be, anywhere", stacklevel=4)
        else:
            self._save({})

    def _parts(self) -> dict[str, Any]:
        """Return the parts that have a state, except the batches and the logs."""
        every = self.checkpoint and self.checkpoint.interval
        parts = {"scheduler": self.schedule, "stopping": self.stopping, "checkpoint every": every}
        return {name: part for name, part in {**parts, **self.journal.parts()}.items() if hasattr(part, "state_dict")}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training, as plain data."""
        return {
            "batches": self.batches.state_dict(),
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "logs": [one.log.state_dict() for one in self.journal.logs],
            "elapsed": self.journal.seconds(),
            "numbers": writable(self.state.metrics),
        }

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint. Raises `CheckpointError`, and leaves `opt` and the position of the batches as they
        are."""
        before = self.batches.state_dict()
        try:
            self.opt.load_checkpoint(path, take=lambda extra: self.load_state_dict(own_of(extra, path)))
        except BaseException:
            self.batches.load_state_dict(before)
            raise

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there. Raises `ValueError`, and changes nothing, for another data set or another scheduler."""
        parts = self._parts()
        check(self.schedule, state["parts"].get("scheduler"))
        self.batches.load_state_dict(state["batches"])
        for name, part in parts.items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        self.journal.resume(state["logs"], state["elapsed"])
        self.state.metrics = dict(state["numbers"])
        self.saved = self.batches.iteration
