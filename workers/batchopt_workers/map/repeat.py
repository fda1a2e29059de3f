"""The evaluation that repeats, in a worker: no message, but numbers in shared memory that both sides read and write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.process import faults
from batchopt_workers.process.messages import Order, Report
from batchopt_workers.tasks.task_runner import ChunkDone

# Numbers of 8 bytes in a page: the first one is the parent's, the others are one for each worker.
PAGE = 512
# In a worker's page: the number it is done with, whether that was by the book, whether it takes part, the order's
# first and last chunk and step, when it began, how long it took; then the losses, of each term and partial.
DONE, ODD, ACTIVE, FIRST, LAST, STEP, BEGAN, SECONDS, LOSSES = range(9)


class Board:
    """The pages of `workers` workers in shared memory, as arrays of NumPy."""

    def __init__(self, block: SharedBlock, workers: int) -> None:
        self.block, self.workers = block, workers
        whole = block.tensor(torch.int64, (workers + 1, PAGE)).numpy()
        floats = block.tensor(torch.float64, (workers + 1, PAGE)).numpy()
        self.head = whole[0, :3]  # the number of the evaluation; the last one that was given up; which batch
        self.done, self.odd, self.active = (whole[1:, i] for i in (DONE, ODD, ACTIVE))
        self.orders = whole[1:, FIRST : STEP + 1]
        self.times = floats[1:, BEGAN : SECONDS + 1]
        self.losses = floats[1:, LOSSES:]

    @classmethod
    def create(cls, workers: int) -> Board:
        """A new one."""
        return cls(SharedBlock.create(8 * PAGE * (workers + 1)), workers)


if TYPE_CHECKING:
    from batchopt_workers.process.session import Session


class Failed(Exception):
    """What the user's code raised in evaluation `number`, about these samples; the order that follows raises it."""

    def __init__(self, number: int, error: BaseException, samples: range) -> None:
        super().__init__(number)
        self.number, self.error, self.samples = number, error, samples


class Repeater:
    """Evaluates once more what was ordered, when `bell` rings (a descriptor of events that is read then).

    What an order found last, its partials and rows, has to be found again, other losses aside, and hooks return
    nothing: else, and where something is raised, the evaluation is odd, and the parent orders it. What was found is the
    answer to that order.
    """

    def __init__(self, board: Board, slot: int, bell: int) -> None:
        self.bell = bell
        self.failed: Failed | None = None
        self._found: tuple[Order, list[ChunkDone]] | None = None  # last
        self._board, self._slot = board, slot
        self._ordered: Report | None = None
        self._number, self._step = 0, -1  # of the last one

    def ordered(self, report: Report, step: int) -> None:
        """An order of that step was evaluated to its end."""
        self._ordered, self._step = report, step

    def evaluate(self, session: Session) -> None:
        """Evaluate what the board says, unless that was done, or given up."""
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
                self._step = -1  # if it is interrupted
                session.begin_again(batch)
                self._step = step
            found = []
            for done in session.evaluate(Order(-1 - number, step, first, last)):  # no order goes on from here
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
        # Two workers may each believe that the other one is not done: the parent looks by itself, too.
        if ((board.done == number) | (board.active == 0)).all():
            session.wake_parent()

    def _write(self, found: Sequence[ChunkDone]) -> bool:
        """Write the losses and the time; False if something else is another, or there is more to tell."""
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
        """Something was said to this worker: nothing that was found answers an order that follows."""
        self._found = None

    def answer(self, order: Order, session: Session) -> list[ChunkDone]:
        """What was found when the evaluation of this order was rung for; nothing if it was not. Raises `Failed`."""
        failed, self.failed, found, self._found = self.failed, None, self._found, None
        if failed is not None and failed.number == order.evaluation:
            raise failed
        if found is None or found[0] != order:
            return []
        drew = session.look(order.step)
        found[1][-1].sums.evaluation = order.evaluation  # which goes on from here
        return [done._replace(drew=drew) for done in found[1]]
