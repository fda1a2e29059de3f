"""A step of an optimizer: made whole, paused at an accepted point, or undone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from batchopt._engine.compilation import Abandoned
from batchopt._engine.engine import Engine
from batchopt._engine.observer import Stepped
from batchopt._engine.rollback import Rollback
from batchopt._engine.step import Found
from batchopt._engine.stop_requests import StopRequests
from batchopt._engine.undo import Undo
from batchopt._machine.interrupts import Held
from batchopt.errors import BatchoptError
from batchopt.optim.minimizer import Iteration, Minimizer, Result, Status, Watch
from batchopt_workers.batch.batch import Batch


class Steps(Watch):
    """Makes steps. After an exception parameters, buffers, counters, history and the optimizer's state are as before,
    less what `Rollback` forgets; but for a `KeyboardInterrupt` after which an optimizer has set the best point, if that
    is to be kept. Once a step has counted it is made, whatever observers of its end raise."""

    def __init__(self, engine: Engine, rollback: Rollback, requests: StopRequests) -> None:
        self.requests, self._engine, self._rollback = requests, engine, rollback
        self._batch: Batch | None = None  # of the present step; `optimize()` may be called without one
        self._held = Held()

    @property
    def looks(self) -> bool:  # type: ignore[override]
        return bool(self._engine.observers)

    def accepted(self, point: Iteration) -> None:
        for observer in self._engine.observers:
            observer.accepted(self._engine.past.counters.batches + 1, point)

    def is_over(self, has_moved: bool) -> bool:
        if self._batch is not None and self._engine.loaded().batch is not self._batch:
            raise BatchoptError(
                "another batch was loaded in the middle of a step, by a callback, and f would be another function from "
                "here on: load it between two steps; score, predict and collect take data of their own"
            )
        if not has_moved and self.requests.is_late:
            self._engine.observers.decided("the time was over before the first point, which is reached all the same")
        return self.requests.is_due(has_moved)

    def make(
        self,
        load: Callable[[], None],
        optimize: Callable[[], None],
        optimizer: torch.optim.Optimizer | None,
        reports: bool,
        time_limit: float | None,
    ) -> float:
        """Load a batch and optimize on it; return the loss. `reports`: `optimize` is a step of the optimizer, whose
        result tells which evaluation was at the final parameters."""
        engine, held, undo = self._engine, self._held, Undo(self._engine, "step")
        self._rollback.take(optimizer)
        self.requests.begin(time_limit)
        interrupt: KeyboardInterrupt | None = None
        try:
            for observer in engine.observers:
                observer.step_begins()
            with undo:
                interrupt = self._optimize(load, optimize, optimizer, reports)
        except BaseException as error:
            engine.subject.bind()
            undo.back()  # also what came between its end and here
            self._rollback.back()
            held.let_through()
            if isinstance(error, Abandoned):
                return self.make(load, optimize, optimizer, reports, None)  # within the same limit
            self.requests.abandon()
            for observer in engine.observers:
                observer.step_ended(None)
            raise
        if held.holds:
            held.end()
        self.requests.end()
        counters = engine.past.counters
        for observer in engine.observers:
            observer.step_ended(Stepped(counters.batches, counters.evaluations, counters.loss, reports))
        if interrupt is not None:
            raise interrupt
        if held.heard:
            held.let_through()
        return counters.loss

    def _optimize(
        self,
        load: Callable[[], None],
        optimize: Callable[[], None],
        optimizer: torch.optim.Optimizer | None,
        reports: bool,
    ) -> KeyboardInterrupt | None:
        """Do so, and count the step, during which Ctrl-C is held back; return the interrupt that ended it."""
        engine, held = self._engine, self._held
        interrupt: KeyboardInterrupt | None = None
        load()
        self._batch = engine.step and engine.step.batch
        minimizer = optimizer if isinstance(optimizer, Minimizer) else None
        before = None if minimizer is None else minimizer.result
        outer, trials = engine.trials, list[Found | None]()
        engine.trials = trials if reports else None
        keeps = minimizer is not None and engine.settings.on_interrupt == "keep"
        try:
            optimize()
            if keeps:
                held.begin()
        except KeyboardInterrupt as error:
            if not keeps:
                raise
            held.begin()
            interrupt = error
        finally:
            engine.trials, self._batch = outer, None
        result = None if minimizer is None or minimizer.result is before else minimizer.result
        if interrupt is not None and not _has_point(result):
            raise interrupt
        left = trials[len(trials) - result.evaluations + result.number - 1] if reports and result is not None else None
        engine.end_step()
        engine.stepped(left, result is not None and result.status is Status.PAUSED)
        return interrupt


def _has_point(result: Result | None) -> bool:
    """Tell whether a step that was interrupted has set the best point."""
    return result is not None and result.status is Status.INTERRUPTED and math.isfinite(result.f)
