"""Repeated evaluations in a worker: instead of messages, numbers in shared memory that both sides read and write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.process.messages import Order, Report
from batchopt_workers.tasks.task_runner import ChunkDone

# 8-byte numbers per page. The first page is the parent's, the others belong to one worker each.
PAGE = 512
# A worker's page: the number of the last evaluation done, whether that was odd, whether the worker takes part, the
# order's first and last chunk and step, the start time, the duration; then the losses of each term and partial.
DONE, ODD, ACTIVE, FIRST, LAST, STEP, BEGAN, SECONDS, LOSSES = range(9)


class Board:
    """The pages of `workers` workers in shared memory, as NumPy arrays."""

    def __init__(self, block: SharedBlock, workers: int) -> None:
        self.block, self.workers = block, workers
        whole = block.tensor(torch.int64, (workers + 1, PAGE)).numpy()
        floats = block.tensor(torch.float64, (workers + 1, PAGE)).numpy()
        self.head = whole[0, :3]  # the evaluation's number; the last abandoned one's; the batch
        self.done, self.odd, self.active = (whole[1:, i] for i in (DONE, ODD, ACTIVE))
        self.orders = whole[1:, FIRST : STEP + 1]
        self.times = floats[1:, BEGAN : SECONDS + 1]
        self.losses = floats[1:, LOSSES:]

    @classmethod
    def create(cls, workers: int) -> Board:
        """Create a board in new memory."""
        return cls(SharedBlock.create(8 * PAGE * (workers + 1)), workers)


class Failed(Exception):
    """An exception of the user's code in evaluation `number`, about these samples; the order that follows raises it."""

    def __init__(self, number: int, error: BaseException, samples: range) -> None:
        super().__init__(number)
        self.number, self.error, self.samples = number, error, samples


class Asked(NamedTuple):
    """A request of the board: an evaluation by this order; `batch`: the number of the batch on which it begins a step,
    None where the step is that of the last evaluation."""

    number: int
    order: Order
    batch: int | None


class Repeater:
    """Reads from the board when the last order is to be evaluated again, after `bell` (an event descriptor) has rung,
    and writes there what was found. Whoever has the module makes the evaluation.

    The partials and rows must be those of the last order, except for the losses, and hooks must return nothing;
    otherwise, or if something is raised, the evaluation is marked odd, and the parent orders it. The results then
    answer that order.
    """

    def __init__(self, board: Board, slot: int, bell: int) -> None:
        self.bell = bell
        self._failed: Failed | None = None
        self._found: tuple[Order, list[ChunkDone]] | None = None  # last
        self._board, self._slot = board, slot
        self._ordered: Report | None = None
        self._number, self._step = 0, -1  # of the last evaluation

    def ordered(self, report: Report, step: int) -> None:
        """Note the report of an order of that step, evaluated to its end."""
        self._ordered, self._step = report, step

    def asked(self) -> Asked | None:
        """Return what the board asks for; None if that is done or was abandoned."""
        number, given_up, batch = self._board.head.tolist()
        if number == self._number or number <= given_up:
            return None
        self._number = number
        first, last, step = self._board.orders[self._slot].tolist()
        order = Order(-1 - number, step, first, last)  # no order continues these sums
        return Asked(number, order, None if step == self._step else batch)

    def begins(self, step: int) -> None:
        """Note the step of the module's state; -1 while it changes, in case of an interrupt."""
        self._step = step

    def is_abandoned(self, number: int) -> bool:
        """Tell whether the parent no longer waits for evaluation `number`."""
        return bool(self._board.head[1] >= number)

    def finish(self, asked: Asked, found: list[ChunkDone], failed: Failed | None) -> bool:
        """Write the result, or that it is odd; return whether this worker is the last one, and has to wake the parent
        up. Two workers may each see the other one as not done: therefore the parent also checks by itself."""
        board, slot, self._failed, odd = self._board, self._slot, failed, True
        if failed is None:
            odd, self._found = not self._write(found), (asked.order._replace(evaluation=asked.number), found)
        board.odd[slot] = odd
        board.done[slot] = asked.number
        return bool(((board.done == asked.number) | (board.active == 0)).all())

    def _write(self, found: Sequence[ChunkDone]) -> bool:
        """Write the losses and the time; return False if anything else differs, or if there is more to report."""
        before, board, slot = self._ordered, self._board, self._slot
        for done in found:
            if done.form is not None or (done.results and done.says_something):
                return False
        if before is None or before.drew != done.drew:
            return False
        losses = done.sums.again(before.summaries)
        if losses is None:
            return False
        numbers = [*chain.from_iterable(losses)]
        if len(numbers) > board.losses.shape[1]:
            return False
        board.losses[slot, : len(numbers)] = numbers
        board.times[slot] = done.began, done.seconds
        return True

    def forget(self) -> None:
        """Discard the results, since a message came: they do not answer a later order."""
        self._found = None

    def answer(self, order: Order) -> list[ChunkDone]:
        """Return the results if this order's evaluation was already repeated, else nothing. Raise `Failed`."""
        failed, self._failed, found, self._found = self._failed, None, self._found, None
        if failed is not None and failed.number == order.evaluation:
            raise failed
        if found is None or found[0] != order:
            return []
        found[1][-1].sums.evaluation = order.evaluation  # which is continued from here
        return found[1]
