"""The ledger of an evaluation: the chunks without a result, and how many workers were lost with each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

# A chunk is given up once so many workers were lost with it.
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
        """Chunks `first` up to `last` have results."""
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


def due(since: float, seconds: float | None, patience: float) -> float:
    """Return the time from which work begun at `since` is late, given its expected seconds: after `patience` at the
    earliest, and never if the expectation is unknown."""
    return math.inf if seconds is None else since + max(patience, LATE * seconds)
