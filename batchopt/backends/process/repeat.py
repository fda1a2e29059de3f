"""The parent's end of repeated evaluations: an eventfd rings for the workers, which write their results into a page of
shared memory and wake the parent up. Everything unusual is left to orders and replies."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Collection, Sequence

from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import Meanwhile, Repeated
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.worker import WorkerProcess
from batchopt_workers.map.repeat import Board
from batchopt_workers.process import faults
from batchopt_workers.process.messages import Kind, Order

# A repetition that takes LONGER times as long as the previous evaluation, plus PATIENCE seconds, is left to orders.
LONGER, PATIENCE = 3.0, 0.05
# Seconds after which the parent looks without having been woken up.
LOOK = 1e-3


class WakingPipe:
    """A pipe that all workers of a group write to; `reader` is the parent's end, and `fd` theirs. Neither blocks: a
    byte that does not fit any more would tell nothing new."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()
        for end in (self.reader, self.fd):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)


class RungOrders:
    """The orders of a repeatable evaluation: each of these workers has all that it needs, as long as the pool has this
    `stamp`. `partials`: the number of each worker's, with `terms` losses each."""

    def __init__(
        self,
        board: Board,
        orders: Sequence[tuple[WorkerProcess, Order]],
        partials: Sequence[int],
        terms: int,
        stamp: int,
    ) -> None:
        self.orders, self.stamp = orders, stamp
        self._board, self._terms = board, terms
        self._bells = [worker.bell.fd for worker, _ in orders if worker.bell is not None]
        slots = [worker.rank for worker, _ in orders]
        board.active[:] = 0
        board.active[slots] = 1
        board.odd[:] = 0
        for slot, (_, order) in zip(slots, orders, strict=True):
            board.orders[slot] = order.first, order.last, order.step
        self._slots = slice(slots[0], slots[-1] + 1) if slots == [*range(slots[0], slots[-1] + 1)] else slots
        self._counts = partials
        self._longest = 0.0

    def ring(self, number: int, step: int, batch: int, seconds: float) -> None:
        """Start evaluation `number`, of that step and batch, which took `seconds` before."""
        # Workers read the number first, so everything else is written before it.
        self._board.orders[self._slots, 2] = step
        self._board.head[2] = batch
        self._longest, self._board.head[0] = LONGER * seconds + PATIENCE, number
        for bell in self._bells:
            os.eventfd_write(bell, 1)
        if faults.hook is not None:
            faults.point("parent.rung")

    def wait(self, number: int, poll: select.epoll, waking: int) -> bool:
        """Wait until all workers are done; False if one deviates, if `poll` reports anything else, or if it takes too
        long. `waking`: the pipe through which they wake this process."""
        board, until, pause = self._board, time.perf_counter() + self._longest, self._longest - PATIENCE
        while True:
            # The last worker wakes this process up; two may each see the other unfinished, so look without that after a
            # while.
            events = poll.poll(max(pause / LONGER, LOOK))
            for fd, _ in events:
                if fd != waking:
                    return False
                os.read(waking, 4096)
            if board.done[self._slots].tolist().count(number) == len(self._counts):
                return 1 not in board.odd[self._slots].tolist()
            if time.perf_counter() > until:
                return False
            pause = 0.0

    def found(self) -> Repeated:
        """Read the workers' results."""
        losses, terms = [], self._terms
        rows = self._board.losses[self._slots, : terms * max(self._counts)].tolist()
        for numbers, count in zip(rows, self._counts, strict=True):
            for i in range(0, count * terms, terms):
                losses.append(numbers[i : i + terms])  # a comprehension would be one more call
        return Repeated(losses, self._board.times[self._slots].tolist())

    def give_up(self, number: int, there: Collection[WorkerProcess]) -> None:
        """Abandon the repetition: workers begin no further chunk, and those that are `there`, and may be evaluating
        one, count as busy."""
        self._board.head[1] = number
        for worker, order in self.orders:
            if worker in there and self._board.done[worker.rank] != number:
                worker.may_be_at(order._replace(evaluation=number))


class Ringer:
    """Rings for the workers of `pool`, which wake this process up through a pipe.

    `last` is the last evaluation, if it can be repeated: while `is_current`, nothing has been sent to a worker since,
    and no worker was replaced.
    """

    def __init__(self, pool: Pool, waking: WakingPipe) -> None:
        self.last: RungOrders | None = None
        self._pool, self._waking = pool, waking
        self._board: Board | None = None
        self._ringing: tuple[RungOrders, int] | None = None  # the current repetition
        self._poll: tuple[int, select.epoll] | None = None  # of the workers at that stamp

    @property
    def is_current(self) -> bool:
        """Tell whether the last evaluation can be repeated now."""
        return self.last is not None and self.last.stamp == self._pool.stamp

    def hang_bell(self, worker: WorkerProcess, workers: int) -> None:
        """Prepare it, one of `workers` workers, for repetitions."""
        if self._board is None or self._board.workers < workers:
            self._board = Board.create(workers)
            for one in self._pool.workers.values():
                one.bell = None
        worker.hang_bell(self._board.block, self._board.workers)

    def remember(self, orders: Sequence[Order | None], answers: Sequence[Answer], terms: int) -> None:
        """Remember this evaluation, which went as planned, if it can be repeated."""
        given = [(self._pool.workers[rank], order) for rank, order in enumerate(orders) if order is not None]
        board, partials = self._board, [len(answer.partials) for answer in answers]
        if board is None or {order.kind for _, order in given} != {Kind.EVALUATE}:
            return
        if max(partials) * terms <= board.losses.shape[1] and all(worker.bell is not None for worker, _ in given):
            self.last = RungOrders(board, given, partials, terms, self._pool.stamp)

    def ring(self, number: int, step: int, batch: int, seconds: float, meanwhile: Meanwhile | None) -> Repeated | None:
        """Repeat the last evaluation as evaluation `number`; None if it did not go as planned."""
        repeat, waking, changes = self.last, self._waking.reader, self._pool.changes
        assert repeat is not None
        if self._poll is None or self._poll[0] != changes:
            self._poll = changes, self._pool.watched(waking)
        try:
            self._ringing = repeat, number
            repeat.ring(number, step, batch, seconds)
            if meanwhile is not None:
                meanwhile()
            if repeat.wait(number, self._poll[1], waking):
                self._ringing = None
                return repeat.found()
        finally:
            if self._ringing is not None:
                self.forget()
        return None

    def forget(self) -> None:
        """Forget the last evaluation, and abandon a repetition that is running."""
        self.last = None
        if self._ringing is not None:
            repeat, number = self._ringing
            repeat.give_up(number, set(self._pool.workers.values()))
            self._ringing = None

    def close(self) -> None:
        """Release memory, after the workers have ended."""
        self.last = self._board = self._ringing = self._poll = None
