"""Which chunks of an evaluation have no result yet, and how many workers or nodes were lost with each.

Both schedulers keep such a ledger; the rest of them differs. On one machine the parent takes chunks from a worker with
an order, which is known to arrive. Across a network it has to ask a node, which may not answer, and what a node hands
over has to be sent to another one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# A chunk is given up once so many workers or nodes were lost with it.
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
        """Of so many chunks, those in `runs` are missing."""
        self._missing = bytearray(chunks)
        for run in runs:
            self._missing[run.first : run.last] = b"\1" * (run.last - run.first)
        self.missing = sum(self._missing)
        self.losses: Counter[int] = Counter()

    def is_missing(self, chunk: int) -> bool:
        """Whether nobody has reported the chunk."""
        return bool(self._missing[chunk])

    def settle(self, first: int, last: int) -> None:
        """Chunks `first` up to `last` need nobody any more: they have results, or are somebody else's to evaluate."""
        if last - first == 1:  # most of the time, and several times an evaluation
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

    def missing_in(self, run: ChunkRun) -> Iterator[int]:
        """The missing chunks of a run."""
        return (chunk for chunk in range(*run) if self._missing[chunk])

    def missing_outside(self, taken: Iterable[ChunkRun]) -> list[ChunkRun]:
        """The missing chunks that are in none of the runs `taken`, as runs; all chunks of one have as many losses."""
        mask = bytearray(self._missing)
        for run in taken:
            mask[run.first : run.last] = bytes(run.last - run.first)
        found, first = [], mask.find(1)
        while first >= 0:
            last = mask.find(0, first)
            last = len(mask) if last < 0 else last
            if self.losses:
                alike = (chunk for chunk in range(first, last) if self.losses[chunk] != self.losses[first])
                last = next(alike, last)
            found.append(ChunkRun(first, last))
            first = mask.find(1, last)
        return found


def due(since: float, seconds: float | None, patience: float) -> float:
    """When somebody is late who began at `since` something that should take so many seconds: after `patience` at the
    earliest, and never if nobody knows how long it should take."""
    return math.inf if seconds is None else since + max(patience, LATE * seconds)
