"""Estimates of the speed of each worker, and of the duration of a split: pure functions of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

# A worker's speed stays within this factor of the median: one bad measurement cannot starve it for good.
LARGEST_RATIO = 1024.0
# The estimate is the median of this many last measurements: a single disturbed one does not change it.
RECENT = 5
# Factor by which a worker's estimate rises with each evaluation without work for it: it may no longer be slow.
RECOVERY = 1.1


@dataclass(frozen=True)
class Speeds:
    """The estimated speed of each worker, in samples per second; None until it is measured.

    `fixed`: given by the user, relative to each other, and never changed. `absent`: workers that get nothing. `recent`:
    the last measurements of each.
    """

    values: tuple[float | None, ...]
    fixed: bool = False
    absent: frozenset[int] = frozenset()
    recent: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def unknown(cls, workers: int) -> Speeds:
        """Return unmeasured speeds."""
        return cls((None,) * workers)

    def resized(self, workers: int) -> Speeds:
        """Return those of `workers` workers, of which the first are the same."""
        recent = (self.recent + ((),) * workers)[:workers]
        return Speeds((self.values + (None,) * workers)[:workers], self.fixed, recent=recent)

    def without(self, absent: Iterable[int]) -> Speeds:
        """Return the speeds with these ranks absent."""
        return replace(self, absent=frozenset(absent))

    @property
    def measured(self) -> bool:
        """Tell whether each worker has a speed."""
        return None not in self.values or all(
            value is not None or i in self.absent for i, value in enumerate(self.values)
        )

    @cached_property
    def relative(self) -> list[float]:
        """Speeds to split by: an unmeasured worker counts as the median of the others, and none differs from the median
        by more than the factor `LARGEST_RATIO`."""
        known = [value for value in self.values if value is not None]
        if self.fixed:
            found = known
        else:
            middle = statistics.median(known) if known else 1.0
            low, high = middle / LARGEST_RATIO, middle * LARGEST_RATIO
            found = [middle if value is None else min(max(value, low), high) for value in self.values]
        return [0.0 if i in self.absent else value for i, value in enumerate(found)]

    def observed(self, samples: Sequence[int], seconds: Sequence[float]) -> Speeds:
        """Return the speeds after an evaluation in which worker `i` took `seconds[i]` for `samples[i]` samples."""
        if self.fixed:
            return self
        values = list(self.values)
        recent = list(self.recent) or [() if value is None else (value,) for value in values]
        for i, (count, spent) in enumerate(zip(samples, seconds, strict=True)):
            if count > 0 and spent > 0:
                recent[i] = (*recent[i][1 - RECENT :], count / spent)
                values[i] = statistics.median(recent[i])
        return replace(self, values=tuple(values), recent=tuple(recent))

    def rested(self, workers: Iterable[int]) -> Speeds:
        """Return the speeds after an evaluation in which these workers had nothing to do. The estimate of one too slow
        to get anything drifts back to the median, until it gets a sample and is measured."""
        workers = list(workers)
        if not workers:
            return self
        values, middle = list(self.values), statistics.median(self.relative)
        recent = list(self.recent) or [() if value is None else (value,) for value in values]
        for i in workers:
            value = values[i]
            if value is not None and value < middle and not self.fixed and i not in self.absent:
                values[i], recent[i] = min(RECOVERY * value, middle), ()
        return replace(self, values=tuple(values), recent=tuple(recent))

    def makespan(self, shares: Sequence[int]) -> float:
        """Return the expected seconds of an evaluation in `shares`; infinite if a worker of speed 0 has samples."""
        return max([c / s if s else math.inf for c, s in zip(shares, self.relative, strict=True) if c], default=0.0)

    def shortest(self, samples: int) -> float:
        """Return a lower bound for the expected seconds of any split of `samples` samples."""
        return samples / (sum(self.relative) or math.inf)
