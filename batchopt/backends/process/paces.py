"""Measured paces of workers: measurements from stragglers, and the deadlines after which a worker counts as hung."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from batchopt.backends.patience import STARTUP, UNKNOWN
from batchopt.backends.process.channel import WorkerReply
from batchopt.backends.process.worker import Activity, PendingMessage, WorkerProcess
from batchopt_workers.process.messages import TASKS, Cut, Kind, Order, Report


class Pace(NamedTuple):
    """A measurement: `samples` took `seconds`, or at least that."""

    samples: int
    seconds: float


@dataclass
class _Left:
    """An abandoned order; the worker has been evaluating one of its chunks, of `samples` samples, since then."""

    order: Order
    cut: Cut
    samples: int
    since: float


class Overdue:
    """The orders that were still running when their evaluation ended.

    As a listener of the pool it learns when they are done after all, which is a measurement; until then, the time so
    far is a lower bound.
    """

    def __init__(self, paces: Mapping[Kind, dict[int, float]]) -> None:
        """Update `paces` (seconds per sample, by rank)."""
        self._paces = paces
        self._left: dict[WorkerProcess, _Left] = {}
        self._found: dict[Kind, dict[int, Pace]] = {kind: {} for kind in paces}

    @property
    def workers(self) -> list[WorkerProcess]:
        """The workers that may still be running an abandoned order."""
        return list(self._left)

    def leave(self, worker: WorkerProcess, order: Order, cut: Cut, chunk: int, since: float) -> None:
        """Note that the worker has been evaluating `chunk` of that order since then, and that the order is
        abandoned."""
        self._left[worker] = _Left(order, cut, cut.bounds[chunk + 1] - cut.bounds[chunk], since)

    def on_reply(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """Take a measurement if the reply ends an abandoned order."""
        left = self._left.get(worker)
        if left is None or asked.order != left.order or reply.kind not in (Kind.DONE, Kind.FAILED):
            return
        del self._left[worker]
        if reply.kind is Kind.DONE:
            with suppress(ValueError, struct.error, IndexError):  # not a report
                report, bounds = Report.decode(reply.body), left.cut.bounds
                self._note(worker, left, bounds[report.next] - bounds[left.order.first], report.seconds)

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Forget the worker's order."""
        self._left.pop(worker, None)

    def take(self, kind: Kind, living: Iterable[WorkerProcess]) -> dict[int, Pace]:
        """Return, by rank, the measurements since the last call of orders of that kind: the time that finished ones
        took, and the time so far of the others."""
        now, there = time.monotonic(), set(living)
        self._left = {worker: left for worker, left in self._left.items() if worker in there and not worker.free}
        for worker, left in self._left.items():
            self._note(worker, left, left.samples, now - left.since)
        found, self._found[kind] = self._found[kind], {}
        return found

    def _note(self, worker: WorkerProcess, left: _Left, samples: int, seconds: float) -> None:
        if samples > 0 and seconds > 0:
            self._found[left.order.kind][worker.rank] = Pace(samples, seconds)
            self._paces[left.order.kind][worker.rank] = seconds / samples


# A worker that takes FACTOR times the expected time counts as hung, but not before FLOOR seconds.
FACTOR, FLOOR = 20.0, 30.0


class Deadlines:
    """The user's `timeout`, or else a multiple of the time expected by the workers' measured speed."""

    def __init__(self, timeout: float | None, paces: Mapping[Kind, Mapping[int, float]]) -> None:
        """`paces`: seconds per sample, by rank, for each kind of order; updated elsewhere."""
        self._timeout, self._paces = timeout, paces
        # whether workers read the samples of the step's batch, or of the task's: this may take far longer than
        # evaluating them
        self.reading = self.reading_for_task = False

    def allowance(self, rank: int, cut: Cut | None, asked: PendingMessage) -> float:
        """Return the seconds without progress after which the worker counts as hung, with this cut."""
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
