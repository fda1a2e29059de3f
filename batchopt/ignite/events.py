"""Events within a step, evaluations of the closure and iterations of batchopt's own optimizers; and exceptions in an
engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from ignite.engine import Engine, EventEnum, Events

from batchopt.extending import Evaluated, Observer, observe
from batchopt.optim.minimizer import Iteration, Minimizer
from batchopt.optimizer import BatchOptimizer


# Events are equal if their names are, so these names must differ from ignite's own.
class StepEvents(EventEnum):
    """`EVALUATED`: f and df/dX were evaluated; `engine.state.evaluation` describes it. `ACCEPTED`: `LBFGS`, `CG` or
    `SSBroyden` has accepted a point; `engine.state.iterate` is its `Iteration`. `engine.terminate()` in a handler of
    the latter also ends the step.

    Filters count all evaluations, and all iterations, of the optimizer: `StepEvents.EVALUATED(every=10)`.
    """

    EVALUATED = "evaluated"
    ACCEPTED = "accepted"


COUNTS = {StepEvents.EVALUATED: "evaluations", StepEvents.ACCEPTED: "iterates"}


class Evaluation(NamedTuple):
    """The `number`-th evaluation of all, which found `loss` and that of each term by name, and took `seconds`."""

    number: int
    loss: float
    terms: Mapping[str, float]
    seconds: float


class _Evaluations(Observer):
    """Fires an engine's event at each evaluation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def evaluated(self, found: Evaluated) -> None:
        """Fire the event."""
        state: Any = self._engine.state
        state.evaluations = found.number
        state.evaluation = Evaluation(found.number, found.loss, found.terms, found.ended - found.began)
        self._engine.fire_event(StepEvents.EVALUATED)


@contextmanager
def telling(engine: Engine, opt: BatchOptimizer) -> Iterator[None]:
    """Fire the engine's events for the steps of `opt` in the body, where they have handlers."""
    evaluations = _Evaluations(engine) if engine._event_handlers.get(StepEvents.EVALUATED) else Observer()
    optimizer = opt.optimizer
    listens = isinstance(optimizer, Minimizer) and engine._event_handlers.get(StepEvents.ACCEPTED)
    with observe(opt, evaluations):
        if not listens or not isinstance(optimizer, Minimizer):
            yield
            return
        own = optimizer.callback
        optimizer.callback = _and_the_engine(own, engine)
        try:
            yield
        finally:
            optimizer.callback = own


def _and_the_engine(own: Callable[[Iteration], object] | None, engine: Engine) -> Callable[[Iteration], bool]:
    """Return a callback that calls the user's own, fires the event, and tells whether either ends the step."""

    def accepted(iteration: Iteration) -> bool:
        ends = own is not None and bool(own(iteration))
        state: Any = engine.state
        state.iterates, state.iterate = iteration.number, iteration
        engine.fire_event(StepEvents.ACCEPTED)
        return ends or bool(engine.should_terminate)

    return accepted


logger = logging.getLogger("batchopt")

AnyEngine = TypeVar("AnyEngine", bound=Engine)


def guarded(engine: AnyEngine) -> AnyEngine:
    """Return the engine, changed to raise what its run, or a handler, has raised.

    All handlers of `Events.EXCEPTION_RAISED` are called first, once each. Exceptions in them are logged; they neither
    hide the error nor keep the other handlers from being called. Without this, ignite continues with the next epoch if
    there is such a handler.
    """
    handled: list[BaseException] = []  # ignite passes an error on at each level of its loops

    def handle(error: BaseException) -> None:
        if not handled or handled[0] is not error:
            handled[:] = [error]
            _tell(engine, error)
        engine._internal_run_generator = None  # the run is over: the next one must not resume this generator
        raise error

    setattr(engine, "_handle_exception", handle)  # noqa: B010  # mypy: a method
    return engine


def _tell(engine: Engine, error: BaseException) -> None:
    """Call all handlers of an error."""
    handlers: dict[Any, list[Any]] = engine._event_handlers
    all_of_them = handlers[Events.EXCEPTION_RAISED]
    try:
        for handler in all_of_them:
            handlers[Events.EXCEPTION_RAISED] = [handler]
            try:
                engine._fire_event(Events.EXCEPTION_RAISED, error)
            except Exception:
                logger.exception("a handler of %s failed; the error itself is raised", type(error).__name__)
    finally:
        handlers[Events.EXCEPTION_RAISED] = all_of_them
