"""Splitting a batch by speed: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def split_batch(n: int, speeds: Sequence[float]) -> list[int]:
    """Return each worker's number of the `n` samples, in proportion to `speeds` (samples per second, or any other
    unit).

    The largest-remainder method, in exact arithmetic: the shares sum to `n`, and each is within 1 of `n * speed /
    sum(speeds)`; the remaining samples go to the largest remainders, ties to the lower index. A worker of speed 0 gets
    nothing; if all speeds are 0 they count as equal. Worker `i` takes the samples after those of worker `i - 1`.

    Raise `TypeError` if `n` is not an int, and `ValueError` for a negative `n`, no speeds, or a speed that is negative,
    infinite or NaN.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"`n` must be an int, got {type(n).__name__} {n!r}")
    if n < 0:
        raise ValueError(f"`n` must be >= 0, got {n}")
    if len(speeds) == 0:
        raise ValueError("`speeds` must have at least one entry")
    for i, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed >= 0):
            raise ValueError(f"`speeds` must be finite and >= 0, got {speed} at index {i}")
    parts = _as_integers(speeds)
    total = sum(parts)
    if total == 0:
        parts, total = [1] * len(speeds), len(speeds)
    shares, remainders = zip(*(divmod(n * part, total) for part in parts), strict=True)
    counts = list(shares)
    by_remainder = sorted(range(len(counts)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: n - sum(counts)]:
        counts[i] += 1
    return counts


def _as_integers(numbers: Sequence[float]) -> list[int]:
    """Return the numbers, all multiplied by the same power of two, which makes them integers."""
    ratios = [float(number).as_integer_ratio() for number in numbers]  # the denominators are powers of two
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def runs(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range `(first, last)` of each share if they lie one after the other."""
    ends = list(accumulate(shares))
    return [(end - share, end) for share, end in zip(shares, ends, strict=True)]
