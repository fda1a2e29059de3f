"""The longest of several trials at which the model still describes the function, and the lengths to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# Lengths to try are up to this factor shorter and longer than the last one.
WINDOW = 3.0
# So many at first, and so many between the longest good one and the next.
FIRST, BETWEEN = 4, 2
# f must have fallen by this fraction of the predicted decrease.
RATIO = 0.1


class Trial(NamedTuple):
    """A step at that damping, of that length before its correction, to `x`, where f has fallen by `ratio` times the
    predicted decrease."""

    length: float
    damping: float
    step: torch.Tensor
    predicted: float
    x: torch.Tensor
    ratio: float = math.nan


def around(length: float) -> torch.Tensor:
    """Return lengths to try around the last one, from short to long: shape `(FIRST,)`."""
    return length * WINDOW ** torch.linspace(-1.0, 1.0, FIRST, dtype=torch.float64)


def between(short: float, long: float) -> torch.Tensor:
    """Return lengths that divide the ones between these by equal factors: shape `(BETWEEN,)`."""
    inner = torch.linspace(0.0, 1.0, BETWEEN + 2, dtype=torch.float64)[1:-1]
    return short * (long / short) ** inner


def longest(trials: Sequence[Trial]) -> int | None:
    """Return the number of the last trial before the first one whose ratio is too small; None if that is the first."""
    bad = next((i for i, trial in enumerate(trials) if not trial.ratio >= RATIO), len(trials))
    return bad - 1 if bad else None
