"""What a run comes to as time goes by."""

from __future__ import annotations

import time
from collections.abc import Callable

# A row each time that so many times the seconds have gone by.
ROWS = 1.1


class Curve:
    """What a run came to, now and then: seconds without those for looking, evaluations, loss, error."""

    def __init__(self, error: Callable[[], float], limit: float) -> None:
        self.rows: list[tuple[float, int, float, float]] = []
        self._error, self._limit = error, limit
        self._began = time.perf_counter()
        self._next = 1.0

    @property
    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.seconds >= self._limit

    def look(self, evaluations: int, loss: float) -> None:
        """One row more, if it is time for one."""
        now = self.seconds
        if now < self._next and now < self._limit:
            return
        looked = time.perf_counter()
        self.rows.append((round(now, 2), evaluations, loss, self._error()))
        self._next = now * ROWS
        self._began += time.perf_counter() - looked
