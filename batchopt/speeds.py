"""How fast the workers are, and whether the shares still fit: decisions on plain numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from batchopt.split import split_batch

# A worker's speed stays within this factor of the median: one bad measurement cannot starve it for good.
LARGEST_RATIO = 16.0
# The part of the estimate that each new measurement replaces.
GAIN = 0.5
# Shares are cut anew when that is expected to save more than this part of an evaluation.
WORTHWHILE = 0.1


@dataclass(frozen=True)
class Speeds:
    """The estimated speed of each worker, in samples per second; None as long as it was not measured.

    `fixed`: given by the user, relative to each other, and never changed. `absent`: workers that get nothing.
    """

    values: tuple[float | None, ...]
    fixed: bool = False
    absent: frozenset[int] = frozenset()

    @classmethod
    def unknown(cls, workers: int) -> Speeds:
        """Nothing measured yet."""
        return cls((None,) * workers)

    def resized(self, workers: int) -> Speeds:
        """Those of so many workers, of which the first are the same."""
        return Speeds((self.values + (None,) * workers)[:workers], self.fixed)

    def without(self, absent: Iterable[int]) -> Speeds:
        """The same, but that the workers of these ranks get nothing."""
        return replace(self, absent=frozenset(absent))

    @property
    def measured(self) -> bool:
        """Whether each worker has a speed."""
        return all(value is not None or i in self.absent for i, value in enumerate(self.values))

    def relative(self) -> list[float]:
        """Speeds to split by: a worker not measured counts as the median of the others, and none is further from the
        median than `LARGEST_RATIO`."""
        known = [value for value in self.values if value is not None]
        if self.fixed:
            found = known
        else:
            middle = statistics.median(known) if known else 1.0
            low, high = middle / LARGEST_RATIO, middle * LARGEST_RATIO
            found = [middle if value is None else min(max(value, low), high) for value in self.values]
        return [0.0 if i in self.absent else value for i, value in enumerate(found)]

    def observed(self, samples: Sequence[int], seconds: Sequence[float]) -> Speeds:
        """The speeds after an evaluation in which worker `i` took `seconds[i]` for `samples[i]` samples."""
        if self.fixed:
            return self
        values = list(self.values)
        for i, (count, spent) in enumerate(zip(samples, seconds, strict=True)):
            if count > 0 and spent > 0:
                old = values[i]
                values[i] = count / spent if old is None else old + GAIN * (count / spent - old)
        return replace(self, values=tuple(values))

    def improves_on(self, shares: Sequence[int]) -> bool:
        """Whether splitting anew would shorten an evaluation noticeably, compared with `shares`."""
        speeds = self.relative()

        def makespan(counts: Sequence[int]) -> float:
            return max((c / s for c, s in zip(counts, speeds, strict=True) if c), default=0.0)

        if any(count and not speed for count, speed in zip(shares, speeds, strict=True)):
            return True
        return makespan(split_batch(sum(shares), speeds)) < (1 - WORTHWHILE) * makespan(shares)
