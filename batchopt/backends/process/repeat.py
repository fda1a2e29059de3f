"""The parent's end of an evaluation that is repeated: workers are rung for, and write what they found into a page of
shared memory. Whatever is unusual is left to orders and replies."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Collection, Sequence

from batchopt.backends.base import Repeated
from batchopt.backends.process.worker import WorkerProcess
from batchopt_workers import faults
from batchopt_workers.board import Board
from batchopt_workers.messages import Order

# An evaluation that takes so many times as long as the one before, and so many seconds, is left to orders.
LONGER, PATIENCE = 3.0, 0.05
# Seconds after which the parent looks by itself.
LOOK = 1e-3


class Repeat:
    """The orders of an evaluation that went by the book, to be carried out again: each of these workers has all that it
    needs, as long as the pool has this `stamp`. `partials`: how many each has, with `terms` losses each."""

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
        """Have evaluation `number` made, of that step and batch, which took so many seconds before."""
        self._board.orders[self._slots, 2] = step
        self._board.head[2] = batch
        self._longest, self._board.head[0] = LONGER * seconds + PATIENCE, number
        for bell in self._bells:
            os.eventfd_write(bell, 1)
        if faults.hook is not None:
            faults.point("parent.rung")

    def wait(self, number: int, poll: select.epoll, waking: int) -> bool:
        """Whether all workers are done with it, each by the book. False, too, if something else happens that `poll`
        tells, or it takes too long. `waking`: what they wake this process up through."""
        board, until, pause = self._board, time.perf_counter() + self._longest, self._longest - PATIENCE
        while True:
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
        """What the workers have written."""
        losses, terms = [], self._terms
        rows = self._board.losses[self._slots, : terms * max(self._counts)].tolist()
        for numbers, count in zip(rows, self._counts, strict=True):
            for i in range(0, count * terms, terms):
                losses.append(numbers[i : i + terms])  # a comprehension is a call more
        return Repeated(losses, self._board.times[self._slots].tolist())

    def give_up(self, number: int, there: Collection[WorkerProcess]) -> None:
        """Nobody waits for it any more: workers begin no further chunk, and those of them who are `there`, and may be
        at one, count as busy."""
        self._board.head[1] = number
        for worker, order in self.orders:
            if worker in there and self._board.done[worker.rank] != number:
                worker.may_be_at(order._replace(evaluation=number))
