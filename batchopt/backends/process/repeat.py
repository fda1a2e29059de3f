"""An evaluation, or a total, for which nothing has changed since the one before: ring, wait, and read the numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from batchopt._mapreduce.reduce import Answers, Pattern
from batchopt.backends.base import Meanwhile, Run
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.scheduler import WORTHWHILE
from batchopt_workers.evaluate.sums import Array
from batchopt_workers.life import faults
from batchopt_workers.wire.orders import TASKS, Cut, Kind, Order, Start
from batchopt_workers.wire.page import (
    BEGAN,
    DONE,
    NEXT,
    REPORTS,
    SAID,
    SECONDS,
    SHAPE,
    SLOT,
    SLOTS,
    Board,
)

# Times as long as the previous evaluation, and seconds more, after which a worker may be late: the rest is not a
# repetition.
LONGER, GRACE = 3.0, 0.05
# Seconds after which the parent looks without having been woken up: see `page`.
LOOK = 1e-3
NO_LOSSES: Array = np.empty(0)  # of totals
_SECONDS = itemgetter(1)


class Repeat:
    """The orders of one `kind` about `runs` of chunks, which went as planned, with the answers in `pattern`.

    They can be given again while the pool has this `stamp`: then no worker was sent anything since, or was replaced."""

    def __init__(self, pool: Pool, board: Board, kind: Kind, cut: Cut, runs: Sequence[Run], pattern: Pattern) -> None:
        self.stamp, self._pool, self._board = pool.stamp, pool, board
        self.cut, self.runs, self._pattern = cut, runs, pattern
        self._workers = [pool.workers[answer.rank] for answer in pattern.answers]
        self._planned = [(worker, runs[worker.rank]) for worker in self._workers]
        self._shapes = [worker.page.ints[SHAPE] for worker in self._workers]
        self._seconds = max(answer.seconds for answer in pattern.answers)
        self._is_divisible = any(last - first > 1 for first, last in runs)
        self._losses: list[list[Array]] = []  # the memory of each worker's, for each partial
        for worker in self._workers:
            report, _ = worker.page.read(None)
            rows = None if kind in TASKS else worker.memory.rows
            self._losses.append([NO_LOSSES if rows is None else rows[sum.row].losses for _, sum in report.partials])

    def goes_as_before(self, number: int, order: Order, start: Start, meanwhile: Meanwhile | None) -> bool:
        """Give each worker its order of before, as part of another evaluation, and wait. Return whether all went as
        before; if not, they may still be at it, and what they say is as it is in any evaluation."""
        poll, waker = self._pool.events.poll, self._pool.events.fd
        self._board.wake_by_each(self._is_divisible)
        for worker, (first, last) in self._planned:
            worker.order(number, order, first, last, start)
        if faults.hook is not None:
            faults.point("parent.rung")
        if meanwhile is not None:
            meanwhile()
        until, pause = time.perf_counter() + LONGER * self._seconds + GRACE, self._seconds
        at_work = True
        while at_work:
            for fd, _ in poll.poll(max(pause, LOOK)):
                if fd != waker:  # a worker has more to say than numbers, or is gone
                    return False
                os.eventfd_read(fd)
            at_work = False
            for worker in self._workers:
                at_work |= worker.page.ints[DONE] != number
            if at_work and (time.perf_counter() > until or (self._is_divisible and self._has_left(number))):
                return False
            pause = 0.0
        for worker, shape in zip(self._workers, self._shapes, strict=True):
            ints = worker.page.ints
            if ints[SHAPE] != shape or ints[SLOTS + (ints[REPORTS] & 1) * SLOT + SAID]:
                return False
        return True

    def _has_left(self, number: int) -> bool:
        """Tell whether a worker has chunks that it has not begun, and another one, which is done, could take over."""
        for worker in self._workers:
            ints, floats, given = worker.page.ints, worker.page.floats, worker.given
            at = SLOTS + (ints[REPORTS] & 1) * SLOT
            done, left = ints[at + NEXT] - given.first, given.last - ints[at + NEXT] - 1
            if ints[DONE] != number and done > 0 and left * floats[at + SECONDS] / done > WORTHWHILE:
                return True
        return False

    def answers(self) -> Answers:
        """Return the answers, once all went as before."""
        losses: list[list[float]] = []
        times: list[tuple[float, float]] = []
        for worker, memory in zip(self._workers, self._losses, strict=True):
            ints, floats, heard = worker.page.ints, worker.page.floats, worker.heard
            at = SLOTS + (ints[REPORTS] & 1) * SLOT
            times.append((floats[at + BEGAN], floats[at + SECONDS]))
            for array in memory:
                losses.append(array.tolist())
            heard.reports, heard.done = ints[REPORTS], worker.given.number
        self._seconds = max(times, key=_SECONDS)[1]
        return Answers(self._pattern, losses, times)


class Repeats:
    """The last evaluation of each kind, if it can be repeated. `settled_at`: the pool's stamp when an evaluation had
    left nothing to do; since then nothing was sent as long as it has this stamp."""

    def __init__(self) -> None:
        self.found: list[Repeat | None] = [None] * len(Kind)
        self.settled_at = -1

    def take(self, kind: Kind, stamp: int, cut: Cut, runs: Sequence[Run]) -> Repeat | None:
        """Return the evaluation that one of this kind, about these runs, repeats; None if there is none. Until it is
        over, nothing is settled."""
        repeat, self.found[kind] = self.found[kind], None
        settled_at, self.settled_at = self.settled_at, -1
        if repeat is None or not repeat.stamp == stamp == settled_at or cut is not repeat.cut:
            return None
        return repeat if runs is repeat.runs or runs == repeat.runs else None
