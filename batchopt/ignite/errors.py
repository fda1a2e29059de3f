"""Exceptions in an engine."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from ignite.engine import Engine, Events

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
