"""A step of an optimizer: made whole, paused at an accepted point, or undone."""

from __future__ import annotations

import math
from collections.abc import Callable

from batchopt._function.attempt import Attempt
from batchopt._function.compilation import Abandoned
from batchopt._function.ending import Ending
from batchopt._function.engine import Engine
from batchopt._function.observer import Stepped, Trial, Trials
from batchopt.optim.minimizer import Iteration, Minimizer, Status, Watch
from batchopt.optim.rollback import Rollback


class Stepping(Watch):
    """Makes steps. After an exception parameters, buffers, counters, history and the optimizer's state are as before,
    but for a `KeyboardInterrupt` after which an optimizer has set the best point, if that is to be kept."""

    def __init__(self, function: Engine, rollback: Rollback, ending: Ending) -> None:
        self.ending, self._function, self._rollback = ending, function, rollback

    def accepted(self, point: Iteration) -> None:
        for observer in self._function.observers.of_steps:
            observer.accepted(self._function.history.counters.batches + 1, point)

    def is_over(self) -> bool:
        return self.ending.is_due()

    def make(
        self,
        load: Callable[[], None],
        optimize: Callable[[], None],
        minimizer: Minimizer | None,
        time_limit: float | None,
    ) -> float:
        """Load a batch and optimize on it; return the loss. `minimizer`: the optimizer, if it reports what it does."""
        function, rollback, observers = self._function, self._rollback, self._function.observers
        interrupt: KeyboardInterrupt | None = None
        self.ending.begin(time_limit)
        for observer in observers.of_steps:
            observer.step_begins()
        try:
            rollback.take()
            with Attempt(function, "step"):
                load()
                trials = Trials(function.subject.x, function.subject.parameters, minimizer is not None)
                outer, observers.trials = observers.trials, trials
                try:
                    optimize()
                except KeyboardInterrupt as error:
                    if not self._keeps(minimizer):
                        raise
                    interrupt = error
                finally:
                    observers.trials = outer
                left, paused = (trials.left(rollback.start), False) if minimizer is None else _left(trials, minimizer)
                function.end_step()
                function.stepped(left, paused)
            for observer in observers.of_steps:
                counters = function.history.counters
                ended = Stepped(counters.batches, counters.evaluations, counters.loss, minimizer is not None)
                observer.step_ended(ended)
            self.ending.end(paused)
        except BaseException as error:
            function.subject.bind()
            rollback.back()
            for observer in observers.of_steps:
                observer.step_ended(None)
            if not isinstance(error, Abandoned):
                self.ending.abandon()
                raise
            return self.make(load, optimize, minimizer, None)  # within the same limit
        if interrupt is not None:
            raise interrupt
        return function.history.counters.loss

    def _keeps(self, minimizer: Minimizer | None) -> bool:
        """Tell whether an interrupted step ends at the best point that its optimizer has reported."""
        result = None if minimizer is None else minimizer.result
        is_new = result is not None and result.status is Status.INTERRUPTED and math.isfinite(result.f)
        return self._function.settings.on_interrupt == "keep" and is_new


def _left(trials: Trials, minimizer: Minimizer) -> tuple[Trial | None, bool]:
    """Return the evaluation at the final parameters, which the optimizer identifies, and whether it was paused."""
    result = minimizer.result
    assert result is not None
    return trials.number(result.number, result.evaluations), result.status is Status.PAUSED
