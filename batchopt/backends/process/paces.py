"""Measured paces of workers: measurements from stragglers, and the deadlines after which a worker counts as hung."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from batchopt.backends.process.wanted import Activity
from batchopt.backends.process.worker import Listener, WorkerProcess
from batchopt.backends.timeouts import STARTUP, UNKNOWN
from batchopt_workers.wire.orders import Cut, Kind


class Pace(NamedTuple):
    """A measurement: `samples` took `seconds`, or at least that."""

    samples: int
    seconds: float


class _Left(NamedTuple):
    """An abandoned order, by its number; the worker has been evaluating one of its chunks, of `samples` samples, since
    then."""

    number: int
    kind: Kind
    first: int
    cut: Cut
    samples: int
    since: float


class Stragglers(Listener):
    """The orders that were still running when their evaluation ended.

    As a listener of the pool it learns when they are done after all, which is a measurement; until then, the time so
    far is a lower bound.
    """

    def __init__(self, paces: Mapping[Kind, dict[int, float]]) -> None:
        """Update `paces` (seconds per sample, by rank)."""
        self.paces = paces
        self.measured: Mapping[int, Pace] = {}  # measurements of workers that were late in the last evaluation
        self._left: dict[WorkerProcess, _Left] = {}
        self._found: dict[Kind, dict[int, Pace]] = {kind: {} for kind in paces}

    def __bool__(self) -> bool:
        return bool(self._left)

    def abandon(self, worker: WorkerProcess, cut: Cut, chunk: int, since: float) -> None:
        """Note that the worker has been evaluating `chunk` of its order since then, and that the order is
        abandoned."""
        given = worker.given
        self._left[worker] = _Left(
            given.number, given.kind, given.first, cut, cut.bounds[chunk + 1] - cut.bounds[chunk], since
        )

    def on_done(self, worker: WorkerProcess) -> None:
        """Take a measurement if that ends an abandoned order."""
        left = self._left.get(worker)
        if left is None or worker.given.number != left.number:
            return
        del self._left[worker]
        with suppress(ValueError, IndexError):  # not a report
            (report, _), bounds = worker.page.read(None), left.cut.bounds
            self._note(worker, left, bounds[report.next] - bounds[left.first], report.seconds)

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Forget the worker's order."""
        self._left.pop(worker, None)

    def measure(self, kind: Kind, living: Iterable[WorkerProcess]) -> None:
        """Set `measured` to the measurements, by rank, since the last call, of orders of that kind: the time that
        finished ones took, and the time so far of the others."""
        now, there = time.monotonic(), set(living)
        self._left = {worker: left for worker, left in self._left.items() if worker in there and worker.evaluates}
        for worker, left in self._left.items():
            self._note(worker, left, left.samples, now - left.since)
        self.measured, self._found[kind] = self._found[kind], {}

    def _note(self, worker: WorkerProcess, left: _Left, samples: int, seconds: float) -> None:
        if samples > 0 and seconds > 0:
            self._found[left.kind][worker.rank] = Pace(samples, seconds)
            self.paces[left.kind][worker.rank] = seconds / samples


# A worker that takes FACTOR times the expected time counts as hung, but not before FLOOR seconds.
FACTOR, FLOOR = 20.0, 30.0


def allowance(
    worker: WorkerProcess,
    activity: Activity,
    cut: Cut,
    timeout: float | None,
    paces: Mapping[Kind, Mapping[int, float]],
    reading: bool,
) -> float:
    """Return the seconds without progress after which the worker counts as hung: the user's `timeout`, or else a
    multiple of the time expected for a chunk of what it evaluates, with this `cut`, by the workers' measured `paces`.
    `reading`: workers read the samples, which may take far longer than evaluating them."""
    if activity is Activity.STARTING:
        return STARTUP
    if activity is Activity.FUNCTION:
        return timeout or math.inf
    if activity is not Activity.EVALUATING:
        return max(timeout or UNKNOWN, STARTUP)
    if timeout is not None:
        return timeout
    order, bounds = worker.given, cut.bounds
    largest = max((bounds[i + 1] - bounds[i] for i in range(order.first, min(order.last, cut.chunks))), default=0)
    of_kind = paces[order.kind]
    pace = of_kind.get(worker.rank, max(of_kind.values(), default=None))
    floor = UNKNOWN if reading else FLOOR
    return worker.given.leniency * (UNKNOWN if pace is None else max(floor, FACTOR * pace * largest))
