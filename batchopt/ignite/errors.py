"""What an engine does with an exception."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from ignite.engine import Engine, Events

logger = logging.getLogger("batchopt")

AnyEngine = TypeVar("AnyEngine", bound=Engine)


def guarded(engine: AnyEngine) -> AnyEngine:
    """The same engine, which raises what its run, or a handler, has raised.

    All handlers of `Events.EXCEPTION_RAISED` are called before, once each. What one of them raises is logged, and
    neither hides the error nor keeps the others from being called. Without this, ignite goes on with the next epoch if
    there is such a handler.
    """
    told: list[BaseException] = []  # ignite passes an error on at each level of its loops

    def handle(error: BaseException) -> None:
        if not told or told[0] is not error:
            told[:] = [error]
            _tell(engine, error)
        engine._internal_run_generator = None  # it is over: the next run must not ask it for more
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
