"""Policies: decisions, made between evaluations and by their times, about how the next ones are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from batchopt._function.engine import Engine


class Policy(Protocol):
    """A policy of an engine; its decisions may change the engine's workers, chunks, or what they evaluate by."""

    def before(self, engine: Engine) -> None:
        """Do what is due before an evaluation."""

    def took(self, engine: Engine, seconds: float) -> None:
        """Count the time of an evaluation."""


class Recordings:
    """The policy that says what is recorded on a card, or why nothing is, whenever that changes. It decides nothing:
    what is recorded is a matter of the worker there."""

    def __init__(self) -> None:
        self._said: str | None = None

    def before(self, engine: Engine) -> None:
        """See `Policy.before`."""

    def took(self, engine: Engine, seconds: float) -> None:
        """See `Policy.took`."""
        now = engine.workers.infos[0].graph
        if now != self._said:
            self._said = now
            engine.observers.reporter.note("on %s: %s", engine.subject.x.device, now)
