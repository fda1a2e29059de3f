"""Time in which this process did not run (stopped and continued, suspended, paused, in a debugger) or had something else to
do is nobody's silence."""

from __future__ import annotations

import time

# Seconds by which a wait may be late on a busy machine.
LATE = 0.25


class Presence:
    """Knows for how long this process was not there to hear."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def away(self, asked: float) -> float:
        """Of the seconds since this was called last, those beyond the `asked` ones, for which it meant to wait: 0, if it
        was there."""
        now = time.monotonic()
        away = now - self._before - asked - LATE
        self._before = now
        return max(0.0, away)


def later(since: float, away: float) -> float:
    """The time from which on somebody is silent, where that was `since`, and this process was `away` meanwhile."""
    return min(since + away, time.monotonic())
