"""How long a worker may take for what it was asked before it counts as hung: decisions without input or output."""

from __future__ import annotations

import math
from collections.abc import Mapping

from batchopt.backends.patience import STARTUP, UNKNOWN
from batchopt.backends.process.worker import Activity, PendingMessage
from batchopt_workers.messages import TASKS, Cut, Kind

# Once it is known how long something should take, a worker that takes so many times as long counts as hung, but not
# before so many seconds.
FACTOR, FLOOR = 20.0, 30.0


class Deadlines:
    """Allows what the user has said, or else a multiple of what is known of the workers' speed."""

    def __init__(self, timeout: float | None, paces: Mapping[Kind, Mapping[int, float]]) -> None:
        """`paces`: seconds a sample, by rank, for each kind of order; kept current by others."""
        self._timeout, self._paces = timeout, paces
        # whether workers read samples of the batch, or of that of a task: which may take far longer than to evaluate
        # them
        self.reading = self.reading_for_task = False

    def allowance(self, rank: int, cut: Cut | None, asked: PendingMessage) -> float:
        """The seconds without progress after which the worker counts as hung, where it has cut the batch so."""
        if asked.activity is Activity.STARTING:
            return STARTUP
        if asked.activity is Activity.FUNCTION:
            return self._timeout or math.inf
        if asked.order is None or cut is None:
            return max(self._timeout or UNKNOWN, STARTUP)
        if self._timeout is not None:
            return self._timeout
        bounds = cut.bounds
        largest = max(bounds[i + 1] - bounds[i] for i in range(asked.order.first, asked.order.last))
        paces = self._paces[asked.order.kind]
        pace = paces.get(rank, max(paces.values(), default=None))
        reading = self.reading_for_task if asked.order.kind in TASKS else self.reading
        floor = UNKNOWN if reading else FLOOR
        return asked.patience * (UNKNOWN if pace is None else max(floor, FACTOR * pace * largest))
