"""The page of a worker: what it is ordered and what it reports, as numbers in memory that both sides map.

    parent                                                         worker
    EVALUATION .. AFTER, then NUMBER   ──── RING in the pipe ───►  an order, unless DONE is its number
    LAST, lowered                      ─────────────────────────►  after each chunk: none is begun from there on
                     REPORTS, after one of two slots in turn  ◄──  after each chunk
                     DONE = NUMBER                            ◄──  nothing more will be done about the order

What must hold, and why:

- A number is written after all that it announces (NUMBER, REPORTS, DONE). So a death, an interrupt or a look at any
  time finds what was announced before: that is why there are two slots.
- An order is given only to a worker that is done with the one before: it never reads one that is being written. It may
  be rung for more than once, also before the calls that the order needs: so it waits until it has made call `AFTER`.
- The rows that a report names stay as they are until the worker begins another chunk, and it looks at LAST before. So
  after the parent has lowered LAST, the latest report names rows that nobody writes any more. Each side writes its own
  number before it reads the other's: `fence` keeps processors from exchanging the two.
- A reader that is overtaken by two reports has read a slot while it was written: it finds REPORTS changed, and reads
  again.

Losses, and which parameters had a gradient, are at the end of the row that they belong to. The worker that finds all
others done wakes the parent up, or, where the parent says so, each one does. Two may each find the other at work, where
processors exchange after all; so the parent also looks by itself after a while.
"""

from __future__ import annotations

import threading

import torch

from batchopt_workers.evaluate.sums import PartialSum, Report, Rows
from batchopt_workers.evaluate.tree import Node
from batchopt_workers.life import faults
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.orders import Kind, Order, Start

# 8-byte numbers of a page. The first page has those for all workers, the others belong to one worker each.
PAGE = 512
# Of all: whether each worker wakes the parent up when it is done.
EACH = 0
# Written by the parent; by the worker, in another cache line; and the two slots for reports.
EVALUATION, STEP, KIND, FIRST, LAST, BATCH, START, AFTER, NUMBER = range(9)
DONE, REPORTS, SHAPE = range(16, 19)
SLOTS, SLOT = 32, 240
# In a slot; then three numbers for each partial: level and position in the tree, and the row.
NEXT, BEGAN, SECONDS, DREW, SAID, HOOKED, COUNT, PARTIALS = range(8)
# A partial for each level of a tree of 2**32 chunks, twice, is more than a worker ever holds.
MOST = (SLOT - PARTIALS) // 3

_lock = threading.Lock()


def fence() -> None:
    """Make what was written before visible to other processes before anything is read after."""
    _lock.acquire()  # an atomic operation, which is a barrier
    _lock.release()


class Board:
    """The pages of up to `workers` workers in shared memory."""

    def __init__(self, block: SharedBlock, workers: int) -> None:
        self.block, self.workers = block, workers
        numbers = block.tensor(torch.int64, (workers + 1, PAGE)).numpy()
        self._given, self._done = numbers[1:, NUMBER], numbers[1:, DONE]
        self.ints, self.floats = block.memory.data.cast("q"), block.memory.data.cast("d")

    @classmethod
    def create(cls, workers: int) -> Board:
        """Create a board in new memory."""
        return cls(SharedBlock.create(8 * PAGE * (workers + 1)), workers)

    def page(self, worker: int) -> Page:
        """Return the page of a worker."""
        return Page(self, worker)

    def wake_by_each(self, each: bool) -> None:
        """Set whether each worker wakes the parent up when it is done, or the last one."""
        self.ints[EACH] = each

    @property
    def is_done(self) -> bool:
        """Tell whether no worker has anything to do."""
        return bool((self._done == self._given).all())


class Page:
    """The page of one worker; methods say whose they are."""

    def __init__(self, board: Board, worker: int) -> None:
        place = slice((worker + 1) * PAGE, (worker + 2) * PAGE)
        self.ints, self.floats = board.ints[place], board.floats[place]
        self._board = board
        self.waker = -1  # in the worker: the event descriptor that wakes the parent up
        self._shapes: dict[int, object] = {}  # of the last report of an order of each kind: all but losses and times

    # ---- the parent's

    def clear(self, number: int) -> None:
        """Begin a page for a worker that is done with order `number`."""
        self.ints[:] = memoryview(bytes(8 * PAGE)).cast("q")
        self.ints[NUMBER] = self.ints[DONE] = number

    def limit(self, last: int) -> None:
        """Shorten the order to the chunks before `last`."""
        if last < self.ints[LAST]:
            self.ints[LAST] = last

    def read(self, rows: Rows | None) -> tuple[Report, bool]:
        """Return the latest report, with the losses in these rows (those of a task have none), and whether a posthook
        ran. Raise `ValueError` for numbers that cannot be right."""
        ints, floats = self.ints, self.floats
        number: int | None = None
        while number != ints[REPORTS]:
            number, found = ints[REPORTS], list[tuple[Node, PartialSum]]()
            at = SLOTS + (number & 1) * SLOT
            if not 0 <= ints[at + COUNT] <= MOST:
                raise ValueError(f"a report of {ints[at + COUNT]} partials")
            for i in range(at + PARTIALS, at + PARTIALS + 3 * ints[at + COUNT], 3):
                node, row, losses, used = Node(ints[i], ints[i + 1]), ints[i + 2], (), b""
                if row < 0 or (rows is not None and row >= len(rows)):
                    raise ValueError(f"a partial {node} in row {row} of {0 if rows is None else len(rows)}")
                if rows is not None:
                    losses, used = tuple(rows[row].losses.tolist()), rows[row].used.tobytes()
                found.append((node, PartialSum(row, losses, used)))
            times = floats[at + BEGAN], floats[at + SECONDS]
            report = Report(ints[at + NEXT], *times, bool(ints[at + DREW]), found)
        return report, bool(ints[at + HOOKED])

    # ---- the worker's

    def order(self, made: int = 0) -> tuple[int, Order, Start] | None:
        """Return the number of the order to carry out, and the order; None if there is none for a worker that has made
        the calls up to that number."""
        ints = self.ints
        if ints[NUMBER] == ints[DONE] or made < ints[AFTER]:
            return None
        evaluation, step, kind, first, last, batch, start, _ = ints[EVALUATION:NUMBER]
        return ints[NUMBER], Order(evaluation, step, first, last, Kind(kind)), Start(batch, start)

    def report(self, report: Report, said: int, hooked: bool, rows: Rows | None) -> bool:
        """Make a report. `said`: messages about the order so far; `hooked`: a posthook ran; `rows` have the sums, None
        if there are none, or elsewhere. Return whether another chunk is to be begun."""
        ints, floats, number = self.ints, self.floats, self.ints[REPORTS] + 1
        at = SLOTS + (number & 1) * SLOT
        ints[at + NEXT], floats[at + BEGAN], floats[at + SECONDS], ints[at + DREW], partials = report
        ints[at + SAID], ints[at + HOOKED], ints[at + COUNT] = said, hooked, len(partials)
        at += PARTIALS
        for (ints[at], ints[at + 1]), partial in partials:
            ints[at + 2] = partial.row
            if rows is not None:
                rows[partial.row].losses[:] = partial.losses
                rows[partial.row].used[:] = memoryview(partial.used)
            at += 3
        if faults.hook is not None:
            faults.point("worker.reporting", report.next - 1)
        ints[REPORTS] = number
        fence()
        return bool(report.next < ints[LAST])

    def finish(self, number: int, last: Report | None) -> bool:
        """Note that the order is done, with this report at the end; None if an exception was raised. Return whether
        this worker has to wake the parent up."""
        ints = self.ints
        kind, shape = ints[KIND], last and (last.next, last.drew, [(node, p.row, p.used) for node, p in last.partials])
        if shape != self._shapes.get(kind):
            self._shapes[kind] = shape
            ints[SHAPE] += 1
        ints[DONE] = number
        fence()
        return bool(self._board.ints[EACH]) or self._board.is_done
