"""Which machine evaluates which chunks during one evaluation, whatever machines do: decisions without input or output.

Each machine is first given the share that the plan has for its workers. A machine that has nothing left takes, in this
order: chunks that nobody evaluates (their machine is gone, or gave them up); half of what the machine with the most
before it has not begun, which that machine is asked for; a copy of what a machine is late with. A chunk counts once.
Work changes hands by a question, since only the machine knows what its workers have begun, and by the answer, which may not
come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchopt._mapreduce.split import runs, split_batch
from batchopt.backends.ledger import POISONOUS, Ledger, Run, due

# A machine is late after so many seconds at the earliest.
PATIENCE = 1.0
# Seconds of work that are worth asking a machine for.
WORTHWHILE = 0.02

# The seconds that machine `i` should need for some runs; None if nobody knows.
Estimate = Callable[[int, Sequence[Run]], float | None]


class Give(NamedTuple):
    """Machine: evaluate these runs, one a worker; None for a worker without any."""

    machine: int
    runs: tuple[Run | None, ...]


class Ask(NamedTuple):
    """Machine: give up half of what no worker has begun."""

    machine: int


@dataclass
class _Task:
    """What a machine is at, and since when. `asked`: when it was asked for some of it, if it has not answered; `spent`:
    whether it has nothing to give."""

    runs: list[Run]
    since: float
    asked: float | None = None
    spent: bool = False


class Handout:
    """One evaluation. Tell it what happens; it says what to do (`decide`)."""

    def __init__(
        self, shares: Mapping[int, Sequence[Run | None]], others: Iterable[Run], chunks: int, price: float = 0.0
    ) -> None:
        """`shares`: the runs planned for each machine's workers; `others`: those of workers that there are not; `price`:
        the seconds that it takes to send a chunk."""
        self._planned = {machine: tuple(share) for machine, share in shares.items() if any(share)}
        self._workers = {machine: len(share) for machine, share in shares.items()}
        self._price = price
        self._ledger = Ledger(
            chunks, [*others, *(run for share in shares.values() for run in share if run is not None)]
        )
        self._tasks: dict[int, _Task] = {}

    @property
    def missing(self) -> int:
        """The number of chunks that nobody has answered."""
        return self._ledger.missing

    @property
    def busy(self) -> list[int]:
        """The machines that have something to do."""
        return list(self._tasks)

    def joined(self, machine: int, workers: int) -> None:
        """There is another machine, with so many workers."""
        self._workers[machine] = workers

    def answered(self, machine: int, done: Iterable[Run]) -> None:
        """The machine has evaluated these runs, and is at nothing any more."""
        for run in done:
            self._ledger.settle(*run)
        self._tasks.pop(machine, None)

    def released(self, machine: int, given: Sequence[Run]) -> None:
        """The machine, asked for some, gave up these runs: none, if it had nothing to give."""
        task = self._tasks.get(machine)
        if task is not None:
            task.asked, task.spent = None, not given
            for gone in given:
                parts = [
                    (Run(run.first, gone.first), Run(gone.last, run.last)) if _meet(run, gone) else (run,)
                    for run in task.runs
                ]
                task.runs = [part for found in parts for part in found if part.first < part.last]

    def lost(self, machine: int) -> int | None:
        """The machine is gone. Returns the chunk that it was at, if it was at one only, with which too many were lost:
        before that, what a machine was lost with is cut in half each time."""
        self._workers.pop(machine, None)
        self._planned.pop(machine, None)
        task = self._tasks.pop(machine, None)
        if task is None:
            return None
        chunks = [chunk for run in task.runs for chunk in self._ledger.missing_in(run)]
        self._ledger.losses.update(chunks)
        return chunks[0] if len(chunks) == 1 and self._ledger.losses[chunks[0]] >= POISONOUS else None

    def decide(self, idle: Sequence[int], estimate: Estimate, now: float) -> list[Give | Ask]:
        """What the machines that are `idle` should do, and what to ask others for them."""
        idle = [machine for machine in idle if machine in self._workers and machine not in self._tasks]
        commands: list[Give | Ask] = []
        for machine in idle:
            if machine in self._planned:
                commands.append(self._give(machine, self._planned.pop(machine), now))
        idle = [machine for machine in idle if machine not in self._tasks]
        commands += self._share_out(idle, self._open(self._tasks), now)
        idle = [machine for machine in idle if machine not in self._tasks]
        return commands + (self._more(idle, estimate, now) if idle else [])

    def _share_out(self, idle: Sequence[int], open_: Sequence[Run], now: float) -> list[Give | Ask]:
        """Give runs to those that are idle, one each: in halves if a machine was lost with it, a single one cut for all."""
        found: list[Run] = []
        for run in open_:
            found += _cut(run, [1.0, 1.0]) if self._ledger.losses[run.first] else [run]
        if len(found) == 1 < len(idle):
            found = _cut(found[0], [float(self._workers[machine]) for machine in idle])
        found = [run for run in found if run.first < run.last]
        return [self._give(m, self._spread(m, run), now) for m, run in zip(idle, found, strict=False)]

    def _give(self, machine: int, given: tuple[Run | None, ...], now: float) -> Give:
        whole: list[Run] = []
        for run in sorted(run for run in given if run is not None):
            if whole and whole[-1].last == run.first:
                run = Run(whole.pop().first, run.last)
            whole.append(run)
        self._tasks[machine] = _Task(whole, now)
        return Give(machine, given)

    def _spread(self, machine: int, run: Run) -> tuple[Run | None, ...]:
        """The run cut for the machine's workers."""
        parts = _cut(run, [1.0] * self._workers[machine])
        return tuple(part if part.first < part.last else None for part in parts)

    def _open(self, holders: Iterable[int]) -> list[Run]:
        """The missing chunks that none of these machines has, and that are planned for none."""
        taken = [run for machine in holders for run in self._tasks[machine].runs]
        planned = [run for share in self._planned.values() for run in share if run is not None]
        return self._ledger.missing_outside([*taken, *planned])

    def _more(self, idle: Sequence[int], estimate: Estimate, now: float) -> list[Give | Ask]:
        """Something for machines that have nothing, of what others are at: what they have not begun, if they answer; else
        what they are late with."""
        late = {machine for machine in self._tasks if self._due(machine, estimate) <= now}
        if any(task.asked is not None and now - task.asked < PATIENCE for task in self._tasks.values()):
            return []

        def left(machine: int) -> float:
            task = self._tasks[machine]
            seconds = estimate(machine, task.runs)
            return now - task.since if seconds is None else seconds - (now - task.since)

        askable = [machine for machine, task in self._tasks.items() if not task.spent and task.asked is None]
        victim = max(askable, key=lambda machine: (machine in late, left(machine)), default=None)
        if victim is not None:
            worth = max(WORTHWHILE, self._price * _chunks(self._tasks[victim].runs))
            if victim in late or left(victim) > worth:
                self._tasks[victim].asked = now
                return [Ask(victim)]
        return self._share_out(idle, self._open(machine for machine in self._tasks if machine not in late), now)

    def _due(self, machine: int, estimate: Estimate) -> float:
        """When the machine is late: by its own speed, or else by that of the slowest that is known."""
        task = self._tasks[machine]
        known = [estimate(machine, task.runs)]
        if known == [None]:
            known = [estimate(other, task.runs) for other in self._workers]
        return due(task.since, max((found for found in known if found is not None), default=None), PATIENCE)

    def next_late(self, estimate: Estimate, now: float) -> float:
        """When the next machine becomes late; infinity if that cannot be known."""
        return min((late for machine in self._tasks if (late := self._due(machine, estimate)) > now), default=math.inf)


def _chunks(runs: Sequence[Run]) -> int:
    return sum(run.last - run.first for run in runs)


def _meet(one: Run, other: Run) -> bool:
    return one.first < other.last and other.first < one.last


def _cut(run: Run, weights: Sequence[float]) -> list[Run]:
    """The run in as many parts."""
    return [
        Run(run.first + first, run.first + last) for first, last in runs(split_batch(run.last - run.first, weights))
    ]
