"""Repeated evaluations in a worker: instead of messages, numbers in shared memory that both sides read and write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.process import faults
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


if TYPE_CHECKING:
    from batchopt_workers.process.session import Session


class Failed(Exception):
    """An exception of the user's code in evaluation `number`, about these samples; the order that follows raises it."""

    def __init__(self, number: int, error: BaseException, samples: range) -> None:
        super().__init__(number)
        self.number, self.error, self.samples = number, error, samples


class Repeater:
    """Evaluates the last order again when `bell` (an event descriptor, which is read then) rings.

    The partials and rows must be those of the last order, except for the losses, and hooks must return nothing;
    otherwise, or if something is raised, the evaluation is marked odd, and the parent orders it. The results then
    answer that order.
    """

    def __init__(self, board: Board, slot: int, bell: int) -> None:
        self.bell = bell
        self.failed: Failed | None = None
        self._found: tuple[Order, list[ChunkDone]] | None = None  # last
        self._board, self._slot = board, slot
        self._ordered: Report | None = None
        self._number, self._step = 0, -1  # of the last evaluation

    def ordered(self, report: Report, step: int) -> None:
        """Note the report of an order of that step, evaluated to its end."""
        self._ordered, self._step = report, step

    def evaluate(self, session: Session) -> None:
        """Evaluate what the board requests, unless that is done or was abandoned."""
        board, slot = self._board, self._slot
        number, given_up, batch = board.head.tolist()
        if number == self._number or number <= given_up:
            return
        self._number = number
        first, last, step = board.orders[slot].tolist()
        odd = True
        try:
            if faults.hook is not None:
                faults.point("worker.rung", first)
            if step != self._step:
                self._step = -1  # in case of an interrupt
                session.begin_again(batch)
                self._step = step
            found = []
            for done in session.evaluate(Order(-1 - number, step, first, last)):  # no order continues these sums
                if board.head[1] >= number:
                    return
                found.append(done)
            odd, self._found = not self._write(found), (Order(number, step, first, last), found)
            if faults.hook is not None:
                faults.point("worker.again", last - 1)
        except BaseException as error:
            self.failed, odd = Failed(number, error, session.current), True
        board.odd[slot] = odd
        board.done[slot] = number
        # Two workers may each see the other one as not done: therefore the parent also checks by itself.
        if ((board.done == number) | (board.active == 0)).all():
            session.wake_parent()

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
        board.losses[slot, : len(numbers)] = numbers
        board.times[slot] = done.began, done.seconds
        return True

    def forget(self) -> None:
        """Discard the results, since a message came: they do not answer a later order."""
        self._found = None

    def answer(self, order: Order, session: Session) -> list[ChunkDone]:
        """Return the results if this order's evaluation was already repeated, else nothing. Raise `Failed`."""
        failed, self.failed, found, self._found = self.failed, None, self._found, None
        if failed is not None and failed.number == order.evaluation:
            raise failed
        if found is None or found[0] != order:
            return []
        drew = session.look(order.step)
        found[1][-1].sums.evaluation = order.evaluation  # which is continued from here
        return [done._replace(drew=drew) for done in found[1]]
