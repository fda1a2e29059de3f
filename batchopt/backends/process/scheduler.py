"""The assignment of chunks to workers during one evaluation, whatever happens to them. No input or output.

Each worker first gets the run of chunks that was planned for it. A worker that is done takes, in this order: a run that
no worker evaluates (its worker died, or is still busy with something else); half of what the slowest worker has not
begun (all of it, if its current chunk is late; less or nothing, if the taker is slower); a copy of a late chunk. The
first report of a chunk counts. To move work, its worker is sent an order to stop before a chunk: if it has begun that
chunk by then, it evaluates it in vain.

A chunk during which workers were lost may be the cause, or may not. So it is tried again by itself; one in which a
worker hung is allowed twice the time; a signal from outside counts half; and the last trial is made by one worker
alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# A chunk is abandoned once this many workers were lost with it.
POISONOUS = 3
# A chunk is late after this many times the seconds that it should take.
LATE = 3.0


class ChunkRun(NamedTuple):
    """Chunks `first` up to `last`."""

    first: int
    last: int


class Ledger:
    """The missing chunks of one evaluation, and the losses with each chunk."""

    def __init__(self, chunks: int, runs: Iterable[ChunkRun]) -> None:
        """Begin with the chunks in `runs` missing, of `chunks` in all."""
        self._missing = bytearray(chunks)
        for run in runs:
            self._missing[run.first : run.last] = b"\1" * (run.last - run.first)
        self.missing = sum(self._missing)
        self.losses: Counter[int] = Counter()

    def is_missing(self, chunk: int) -> bool:
        """Tell whether the chunk has no result."""
        return bool(self._missing[chunk])

    def settle(self, first: int, last: int) -> None:
        """Note that chunks `first` up to `last` have results."""
        if last - first == 1:  # the usual case, several times per evaluation
            self.missing -= self._missing[first]
            self._missing[first] = 0
            return
        self.missing -= sum(self._missing[first:last])
        self._missing[first:last] = bytes(last - first)

    def trimmed(self, run: ChunkRun) -> ChunkRun | None:
        """The run without the chunks at both ends that are not missing; None if nothing remains."""
        first, last = run
        while first < last and not self._missing[first]:
            first += 1
        while first < last and not self._missing[last - 1]:
            last -= 1
        return ChunkRun(first, last) if first < last else None


def due(since: float, seconds: float | None, grace: float) -> float:
    """Return the time from which work begun at `since` is late, given its expected seconds: after `grace` at the
    earliest, and never if the expectation is unknown."""
    return math.inf if seconds is None else since + max(grace, LATE * seconds)


# A chunk is late after this many seconds at the earliest.
GRACE = 0.05
# Seconds of work that justify a message: smaller remainders are not stolen.
WORTHWHILE = 0.002

# The expected seconds of worker `i` for chunk `j`; None if unknown.
ChunkEstimate = Callable[[int, int], float | None]


class Assign(NamedTuple):
    """Worker: evaluate chunks `first` up to `last`."""

    worker: int
    first: int
    last: int


class Limit(NamedTuple):
    """Worker: do not begin chunk `last`, nor one after it."""

    worker: int
    last: int


class Death(Enum):
    """The cause of a worker's death, as far as it can be known."""

    FAULT = "fault"  # its own code: SIGSEGV, abort, exit, a violation of the protocol
    HANG = "hang"  # killed, since it made no progress
    OUTSIDE = "outside"  # a signal from outside: the chunk is not the cause, unless it needs too much memory


# The multiple of the usual time that a chunk must have had before it is abandoned because workers hang in it: copies of
# it may have hung at the same time.
LENIENT = 4.0
# How much a death counts against the current chunk.
WEIGHTS = {Death.FAULT: 1.0, Death.HANG: 1.0, Death.OUTSIDE: 0.5}


@dataclass
class _WorkerTask:
    """The chunks of a worker: it has been evaluating `next` since `since` (seconds on any clock), and goes on to
    `last`.

    It was assigned those up to `given`, and may have begun one after `last` before it received a limit. `leniency`: the
    value of `WorkerScheduler.leniency` then. `alone`: whether this is the last trial of a chunk, without copies.
    """

    next: int
    last: int
    given: int
    since: float
    leniency: float
    alone: bool


class WorkerScheduler:
    """Schedules the chunks of one evaluation: it is notified of events (`reported`, `ended`, `lost`) and makes
    decisions (`decide`)."""

    def __init__(self, runs: Sequence[ChunkRun | None], chunks: int, copies: bool = True) -> None:
        """`runs[i]`: the chunks planned for worker `i`, of `chunks` in all; runs have no chunk in common. `copies`:
        whether a late chunk may be assigned to a second worker, and not only the chunks behind it."""
        self._pending: list[tuple[int | None, ChunkRun]] = []  # with the worker that it is planned for
        for worker, run in enumerate(runs):
            if run is not None and run.first < run.last:
                self._pending.append((worker, run))
        self.ledger = Ledger(chunks, [run for _, run in self._pending])
        self._copies = copies
        self._tasks: dict[int, _WorkerTask] = {}
        self._blame: dict[int, float] = {}
        self._leniency: dict[int, float] = {}

    @property
    def missing(self) -> int:
        """The number of chunks that were not reported."""
        return self.ledger.missing

    @property
    def workers(self) -> list[int]:
        """The workers that have something to do."""
        return list(self._tasks)

    @property
    def all_begun(self) -> bool:
        """Tell whether every missing chunk has been begun: then only a late one can be given to another worker."""
        return not self._pending and all(task.next + 1 >= task.last for task in self._tasks.values())

    def current(self, worker: int) -> tuple[int, float] | None:
        """Return the chunk that the worker evaluates, as far as known, and since when; None if there is none."""
        task = self._tasks.get(worker)
        return None if task is None or task.next >= task.last else (task.next, task.since)

    def reported(self, worker: int, done: int, now: float) -> None:
        """Note that the worker has evaluated its chunks before `done`. Raises `ValueError` if they were not assigned to
        it."""
        task = self._tasks.get(worker)
        if task is None or not task.next <= done <= task.given:
            raise ValueError(f"worker {worker} reports chunk {done - 1}, which it was not given")
        if done > task.next:
            self.ledger.settle(task.next, done)
            task.next, task.since = done, now

    def ended(self, worker: int) -> None:
        """Note that the worker has ended its task; its remaining chunks wait for another one."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            self._leave(ChunkRun(task.next, task.last), first=True)

    def lost(self, worker: int, death: Death = Death.FAULT) -> int | None:
        """Note that the worker is dead. Return the chunk that it was evaluating if that is to be abandoned.

        Otherwise that chunk is tried again last: then the others are done by then.
        """
        task = self._tasks.pop(worker, None)
        if task is None or task.next >= task.last:
            return None
        chunk = task.next
        self._leave(ChunkRun(chunk + 1, task.last), first=True)
        if all(run != (chunk, chunk + 1) for _, run in self._pending):
            self._leave(ChunkRun(chunk, chunk + 1), first=False)
        self.ledger.losses[chunk] += 1
        self._blame[chunk] = self._blame.get(chunk, 0.0) + WEIGHTS[death]
        if death is Death.HANG:
            self._leniency[chunk] = max(self.leniency(chunk), 2.0 * task.leniency)
        has_had_time = death is not Death.HANG or task.leniency >= LENIENT
        is_to_blame = task.alone and has_had_time and self._blame[chunk] >= POISONOUS
        return chunk if is_to_blame and self.ledger.is_missing(chunk) else None

    def leniency(self, chunk: int) -> float:
        """Return the factor by which a worker may exceed its usual time: doubled by each trial in which one hung."""
        return self._leniency.get(chunk, 1.0)

    def _is_suspect(self, chunk: int) -> bool:
        """Tell whether one more death may show that the chunk is to blame. Such a chunk is in a run by itself."""
        return self._blame.get(chunk, 0.0) >= POISONOUS - 1

    def _leave(self, run: ChunkRun, first: bool) -> None:
        """Add the run to those that wait for a worker, before or after all others."""
        trimmed = self.ledger.trimmed(run)
        if trimmed is not None:
            self._pending.insert(0 if first else len(self._pending), (None, trimmed))

    def decide(self, idle: Sequence[int], estimate: ChunkEstimate, now: float) -> list[Assign | Limit]:
        """Return the commands for workers that are `idle`, and for those that work is taken from; to be carried out in
        this order."""
        commands: list[Assign | Limit] = []
        without = [worker for worker in idle if worker not in self._tasks]
        for worker in without:
            commands += self._give(worker, self._take(worker), now)
        for worker in without:
            if worker not in self._tasks:
                commands += self._give(worker, self._take(None), now)
        for worker in without:
            if worker not in self._tasks:
                commands += self._steal(worker, estimate, now)
        for worker in without:
            if worker not in self._tasks:
                commands += self._give(worker, self._late(estimate, now), now)
        return commands

    def _take(self, planned_for: int | None) -> ChunkRun | None:
        """Remove and return a pending run that was planned for that worker, or for any if None."""
        current = {task.next for task in self._tasks.values()}
        for i, (worker, run) in enumerate(self._pending):
            waits = run.first in current and self._is_suspect(run.first)
            if (planned_for is None or worker == planned_for) and not waits:
                del self._pending[i]
                trimmed = self.ledger.trimmed(run)
                return trimmed if trimmed is not None else self._take(planned_for)
        return None

    def _give(self, worker: int, run: ChunkRun | None, now: float) -> list[Assign | Limit]:
        if run is None:
            return []
        leniency, alone = self.leniency(run.first), self._is_suspect(run.first)
        self._tasks[worker] = _WorkerTask(run.first, run.last, run.last, now, leniency, alone)
        return [Assign(worker, *run)]

    def _steal(self, worker: int, estimate: ChunkEstimate, now: float) -> list[Assign | Limit]:
        """Take half of what the worker with the most remaining work has not begun: less if the thief is slower, all if
        the current chunk of that worker is late."""

        def ahead(victim: int) -> float:
            run = self._behind(victim)
            if run is None:
                return 0.0
            seconds = estimate(victim, run.first)
            late = self._due(victim, estimate) <= now
            return math.inf if late else (run.last - run.first) * (WORTHWHILE if seconds is None else seconds)

        victim = max(self._tasks, key=ahead, default=None)
        if victim is None or ahead(victim) < WORTHWHILE:
            return []
        run = self._behind(victim)
        assert run is not None
        late = ahead(victim) == math.inf
        middle = run.first if late else run.last - self._portion(worker, victim, run, estimate, now)
        if middle == run.last:
            return []
        self._tasks[victim].last = middle
        return [Limit(victim, middle), *self._give(worker, ChunkRun(middle, run.last), now)]

    def _portion(self, thief: int, victim: int, run: ChunkRun, estimate: ChunkEstimate, now: float) -> int:
        """Return how many of the run's chunks the thief takes so that both finish soonest; half at most."""
        task, chunks = self._tasks[victim], run.last - run.first
        half = chunks - chunks // 2
        ours, theirs, current = estimate(thief, run.first), estimate(victim, run.first), estimate(victim, task.next)
        if ours is None or theirs is None or current is None or ours <= theirs:
            return half
        rest = max(0.0, current - (now - task.since))  # of the victim's current chunk

        def ends(taken: int) -> float:
            return max(taken * ours, rest + (chunks - taken) * theirs)

        portion = min(half, int((rest + chunks * theirs) / (ours + theirs)))
        return portion + 1 if portion < half and ends(portion + 1) < ends(portion) else portion

    def _behind(self, worker: int) -> ChunkRun | None:
        """Return the part of a worker's run that it has not begun and that has no results; None if there is none."""
        task = self._tasks[worker]
        return self.ledger.trimmed(ChunkRun(task.next + 1, task.last))

    def _due(self, worker: int, estimate: ChunkEstimate) -> float:
        """Return the time from which the worker is late with its current chunk."""
        task = self._tasks[worker]
        return due(task.since, estimate(worker, task.next), GRACE)

    def _late(self, estimate: ChunkEstimate, now: float) -> ChunkRun | None:
        """Return a running chunk that is overdue on every worker that runs it."""
        if not self._copies:
            return None
        for chunk, late in sorted(self._dues(estimate).items(), key=lambda item: item[1]):
            if late <= now:
                return ChunkRun(chunk, chunk + 1)
        return None

    def _dues(self, estimate: ChunkEstimate) -> dict[int, float]:
        """Return the time at which each running chunk is overdue on every worker that runs it; never for a suspect."""
        dues: dict[int, float] = {}
        for worker, task in self._tasks.items():
            if task.next < task.last and self.ledger.is_missing(task.next) and not self._is_suspect(task.next):
                late = self._due(worker, estimate)
                dues[task.next] = max(late, dues.get(task.next, late))
        return dues

    def next_late(self, estimate: ChunkEstimate) -> float:
        """Return the next time at which a late chunk can be given to an idle worker; infinity if unknown."""
        blocked = [self._due(worker, estimate) for worker in self._tasks if self._behind(worker) is not None]
        copied = self._dues(estimate).values() if self._copies else ()
        return min([*copied, *blocked], default=math.inf)
