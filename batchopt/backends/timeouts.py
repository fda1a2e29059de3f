"""Timeouts for other processes. Time during which this process was stopped does not count."""

from __future__ import annotations

import time

# Default seconds without progress after which a worker counts as hung: while it starts; and while the expected time is
# unknown.
STARTUP, UNKNOWN = 60.0, 600.0
# A process that ends this many consecutive times before it can work is not started again.
ATTEMPTS = 3
# Seconds to wait for the replies of others once one has failed, so that the same one is named each time.
OTHERS = 0.5
# Seconds by which a wait may end late on a busy machine.
SLACK = 0.25


class Presence:
    """Measures for how long this process did not run (stopped and continued, suspended, in a debugger) or was busy."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def away(self, asked: float) -> float:
        """Return the seconds since the last call beyond the `asked` ones, for which it meant to wait; 0 if it was not
        stopped."""
        now = time.monotonic()
        away = now - self._before - asked - SLACK
        self._before = now
        return max(0.0, away)


def later(since: float, away: float) -> float:
    """Return the time since when a process is silent, if that was `since`, and this process was `away` in between."""
    return min(since + away, time.monotonic())
