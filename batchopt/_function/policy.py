"""Policies decide, between evaluations and by their times, how the next ones are made. Each has two methods:

- `before(engine)` does what is due before an evaluation;
- `took(engine, seconds)` counts the time of one.

Their decisions may change the engine's workers (`auto`), chunks (`sizes`, `fitting`), or what these evaluate by
(`compilation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchopt._function.engine import Engine


class Recordings:
    """The policy that says what is recorded on a card, or why nothing is, whenever that changes. It decides nothing:
    what is recorded is a matter of the worker there."""

    def __init__(self) -> None:
        self._said: str | None = None

    def before(self, engine: Engine) -> None:
        """Do nothing."""

    def took(self, engine: Engine, seconds: float) -> None:
        """Say it if it has changed."""
        now = engine.workers.infos[0].graph
        if now != self._said:
            self._said = now
            engine.observers.decided("on %s: %s", engine.subject.x.device, now)
