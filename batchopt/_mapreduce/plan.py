"""The plan of an evaluation: the cut of the batch into chunks, and the shard of each worker by its speed: pure
functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from batchopt._mapreduce.speeds import Speeds
from batchopt_workers.wire.orders import Cut, Kind, Order


@dataclass(frozen=True)
class Plan:
    """A cut of the batch, and the number of chunks in each worker's shard; `age` counts the evaluations that used it,
    as long as it is new."""

    cut: Cut
    shares: tuple[int, ...]
    age: int = 0

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """For each worker's shard its first chunk, and the chunk after its last."""
        return runs(self.shares)

    def order(self, evaluation: int, step: int, kind: Kind = Kind.EVALUATE) -> Order:
        """Return the order to do this kind of work with all chunks."""
        return Order(evaluation, step, 0, self.cut.chunks, kind)

    def samples(self) -> list[int]:
        """Return each worker's number of samples."""
        bounds = self.cut.bounds
        return [bounds[last] - bounds[first] for first, last in self.runs]


# A plan is replaced if another one is expected to save more than WORTHWHILE of an evaluation; a plan younger than NEW
# evaluations only for a gain above MUCH, since few measurements back it.
WORTHWHILE, MUCH = 0.02, 0.1
# Evaluations for which a plan is new.
NEW = 4
# Number of chunks of a batch if the caller wants reproducible bits, and gives no chunk size.
DETERMINISTIC_CHUNKS = 32


def choose_chunk_size(size: int, given: int | None, deterministic: bool) -> int | None:
    """Return the chunk size for `size` samples, which depends on the data alone; None if chunks need not be fixed."""
    if given is None and deterministic:
        return -(-size // DETERMINISTIC_CHUNKS)
    return given


def make_plan(size: int, chunk_size: int | None, speeds: Speeds) -> Plan:
    """Return a plan for `size` samples: without a chunk size each worker gets one chunk, as large as its speed allows;
    otherwise a run of the chunks that the size fixes."""
    if chunk_size is None:
        counts = split_batch(size, speeds.relative)
        bounds = [0, *accumulate(count for count in counts if count)]
        shares = [1 if count else 0 for count in counts]
    else:
        bounds = [*range(0, size, chunk_size), size]
        shares = split_batch(len(bounds) - 1, speeds.relative)
    return Plan(Cut(tuple(bounds)), tuple(shares))


def plan_of(cut: Cut, speeds: Speeds) -> Plan:
    """Return a plan for a batch with this cut."""
    return Plan(cut, tuple(split_batch(cut.chunks, speeds.relative)))


def replan(plan: Plan, chunk_size: int | None, speeds: Speeds) -> Plan:
    """Return the plan for the next evaluation: the same, unless the measured speeds make another one noticeably faster.

    Fixed chunks stay the same, and are only reassigned: a saving that would need parts of chunks does not count.
    """
    if speeds.fixed or len(plan.shares) == 1:
        return plan
    samples = plan.samples()
    limit = (1 - (MUCH if plan.age < NEW else WORTHWHILE)) * speeds.makespan(samples)
    if speeds.shortest(sum(samples)) < limit:
        other = make_plan(sum(samples), None, speeds) if chunk_size is None else plan_of(plan.cut, speeds)
        if speeds.makespan(other.samples()) < limit:
            return other
    return plan if plan.age >= NEW else replace(plan, age=plan.age + 1)


def split_batch(n: int, speeds: Sequence[float]) -> list[int]:
    """Return each worker's number of the `n` samples, in proportion to `speeds` (samples per second, or any other
    unit).

    The largest-remainder method, in exact arithmetic: the shares sum to `n`, and each is within 1 of `n * speed /
    sum(speeds)`; the remaining samples go to the largest remainders, ties to the lower index. A worker of speed 0 gets
    nothing; if all speeds are 0 they count as equal. Worker `i` takes the samples after those of worker `i - 1`.

    Raise `TypeError` if `n` is not an int, and `ValueError` for a negative `n`, no speeds, or a speed that is negative,
    infinite or NaN.

    >>> batchopt.split_batch(10, [1.0, 1.0, 2.0])
    [3, 2, 5]
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
