"""Which node evaluates which chunks during one evaluation, whatever nodes do: decisions without input or output.

Each node is first given what the plan has for its workers. A node that has nothing left takes, in this order: chunks
that nobody evaluates (their node is gone, or gave them up); half of what the node with the most before it has not
begun, which that node is asked for; a copy of what a node is late with. A chunk counts once. Work changes hands by a
question, since only the node knows what its workers have begun, and by the answer, which may not come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchopt._mapreduce.split import runs, split_batch
from batchopt.backends.ledger import POISONOUS, ChunkRun, Ledger, due

# A node is late after so many seconds at the earliest.
PATIENCE = 1.0
# Seconds of work that are worth asking a node for.
WORTHWHILE = 0.02

# The seconds that node `i` should need for some runs; None if nobody knows.
RunEstimate = Callable[[int, Sequence[ChunkRun]], float | None]


class Give(NamedTuple):
    """Node: evaluate these runs, one a worker; None for a worker without any."""

    node: int
    runs: tuple[ChunkRun | None, ...]


class Ask(NamedTuple):
    """Node: give up half of what no worker has begun."""

    node: int


@dataclass
class _NodeTask:
    """The chunks that a node has, and since when. `asked`: when it was asked for some of them, if it has not answered;
    `spent`: whether it had none to give."""

    runs: list[ChunkRun]
    since: float
    asked: float | None = None
    spent: bool = False


class NodeScheduler:
    """Schedules the chunks of one evaluation. Tell it what happens (`joined`, `answered`, `released`, `lost`); it says
    what to do (`decide`)."""

    def __init__(
        self,
        assignments: Mapping[int, Sequence[ChunkRun | None]],
        others: Iterable[ChunkRun],
        chunks: int,
        price: float = 0.0,
    ) -> None:
        """`assignments`: the runs planned for each node's workers; `others`: those of workers that there are not;
        `price`: the seconds that it takes to send a chunk."""
        self._planned = {node: tuple(assignment) for node, assignment in assignments.items() if any(assignment)}
        self._workers = {node: len(assignment) for node, assignment in assignments.items()}
        self._price = price
        self._ledger = Ledger(
            chunks, [*others, *(run for assignment in assignments.values() for run in assignment if run is not None)]
        )
        self._tasks: dict[int, _NodeTask] = {}

    @property
    def missing(self) -> int:
        """The number of chunks that nobody has answered."""
        return self._ledger.missing

    @property
    def busy(self) -> list[int]:
        """The nodes that have something to do."""
        return list(self._tasks)

    def joined(self, node: int, workers: int) -> None:
        """Another node can work, with so many workers."""
        self._workers[node] = workers

    def answered(self, node: int, done: Iterable[ChunkRun]) -> None:
        """The node has evaluated these runs, and is at nothing any more."""
        for run in done:
            self._ledger.settle(*run)
        self._tasks.pop(node, None)

    def released(self, node: int, given: Sequence[ChunkRun]) -> None:
        """The node, asked for some, gave up these runs: none, if it had nothing to give."""
        task = self._tasks.get(node)
        if task is not None:
            task.asked, task.spent = None, not given
            for gone in given:
                parts = [
                    (ChunkRun(run.first, gone.first), ChunkRun(gone.last, run.last)) if _meet(run, gone) else (run,)
                    for run in task.runs
                ]
                task.runs = [part for found in parts for part in found if part.first < part.last]

    def lost(self, node: int) -> int | None:
        """The node is gone. Returns the chunk that it was at, if it was at one only, with which too many were lost:
        before that, what a node was lost with is cut in half each time."""
        self._workers.pop(node, None)
        self._planned.pop(node, None)
        task = self._tasks.pop(node, None)
        if task is None:
            return None
        chunks = [chunk for run in task.runs for chunk in self._ledger.missing_in(run)]
        self._ledger.losses.update(chunks)
        return chunks[0] if len(chunks) == 1 and self._ledger.losses[chunks[0]] >= POISONOUS else None

    def decide(self, idle: Sequence[int], estimate: RunEstimate, now: float) -> list[Give | Ask]:
        """The commands for nodes that are `idle`, and questions to others for them."""
        idle = [node for node in idle if node in self._workers and node not in self._tasks]
        commands: list[Give | Ask] = []
        for node in idle:
            if node in self._planned:
                commands.append(self._give(node, self._planned.pop(node), now))
        idle = [node for node in idle if node not in self._tasks]
        commands += self._share_out(idle, self._open(self._tasks), now)
        idle = [node for node in idle if node not in self._tasks]
        return commands + (self._more(idle, estimate, now) if idle else [])

    def _share_out(self, idle: Sequence[int], open_: Sequence[ChunkRun], now: float) -> list[Give | Ask]:
        """Give runs to those that are idle, one each: in halves if a node was lost with it, a single one cut for
        all."""
        found: list[ChunkRun] = []
        for run in open_:
            found += _cut(run, [1.0, 1.0]) if self._ledger.losses[run.first] else [run]
        if len(found) == 1 < len(idle):
            found = _cut(found[0], [float(self._workers[node]) for node in idle])
        found = [run for run in found if run.first < run.last]
        return [self._give(m, self._spread(m, run), now) for m, run in zip(idle, found, strict=False)]

    def _give(self, node: int, given: tuple[ChunkRun | None, ...], now: float) -> Give:
        whole: list[ChunkRun] = []
        for run in sorted(run for run in given if run is not None):
            if whole and whole[-1].last == run.first:
                run = ChunkRun(whole.pop().first, run.last)
            whole.append(run)
        self._tasks[node] = _NodeTask(whole, now)
        return Give(node, given)

    def _spread(self, node: int, run: ChunkRun) -> tuple[ChunkRun | None, ...]:
        """Cut the run for the workers of the node."""
        parts = _cut(run, [1.0] * self._workers[node])
        return tuple(part if part.first < part.last else None for part in parts)

    def _open(self, holders: Iterable[int]) -> list[ChunkRun]:
        """The missing chunks that none of these nodes has, and that are planned for none."""
        taken = [run for node in holders for run in self._tasks[node].runs]
        planned = [run for assignment in self._planned.values() for run in assignment if run is not None]
        return self._ledger.missing_outside([*taken, *planned])

    def _more(self, idle: Sequence[int], estimate: RunEstimate, now: float) -> list[Give | Ask]:
        """Something of what others are at, for nodes that have nothing: what those have not begun, if they answer; else
        what they are late with."""
        late = {node for node in self._tasks if self._due(node, estimate) <= now}
        if any(task.asked is not None and now - task.asked < PATIENCE for task in self._tasks.values()):
            return []

        def left(node: int) -> float:
            task = self._tasks[node]
            seconds = estimate(node, task.runs)
            return now - task.since if seconds is None else seconds - (now - task.since)

        askable = [node for node, task in self._tasks.items() if not task.spent and task.asked is None]
        victim = max(askable, key=lambda node: (node in late, left(node)), default=None)
        if victim is not None:
            worth = max(WORTHWHILE, self._price * _chunks(self._tasks[victim].runs))
            if victim in late or left(victim) > worth:
                self._tasks[victim].asked = now
                return [Ask(victim)]
        return self._share_out(idle, self._open(node for node in self._tasks if node not in late), now)

    def _due(self, node: int, estimate: RunEstimate) -> float:
        """When the node is late: by its own speed, or else by that of the slowest that is known."""
        task = self._tasks[node]
        state = [estimate(node, task.runs)]
        if state == [None]:
            state = [estimate(other, task.runs) for other in self._workers]
        return due(task.since, max((found for found in state if found is not None), default=None), PATIENCE)

    def next_late(self, estimate: RunEstimate, now: float) -> float:
        """When the next node becomes late; infinity if that cannot be known."""
        return min((late for node in self._tasks if (late := self._due(node, estimate)) > now), default=math.inf)


def _chunks(runs: Sequence[ChunkRun]) -> int:
    return sum(run.last - run.first for run in runs)


def _meet(one: ChunkRun, other: ChunkRun) -> bool:
    return one.first < other.last and other.first < one.last


def _cut(run: ChunkRun, weights: Sequence[float]) -> list[ChunkRun]:
    """Cut the run into as many parts as there are weights."""
    return [
        ChunkRun(run.first + first, run.first + last)
        for first, last in runs(split_batch(run.last - run.first, weights))
    ]
