"""Splitting by speed, against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchopt
from batchopt import split_batch

COUNTS = st.one_of(st.integers(0, 50), st.integers(0, 10**6))
ANY_SPEED = st.one_of(st.floats(0, 1e308), st.floats(0, 10), st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 2.0, 1e308]))
ANY_SPEEDS = st.lists(ANY_SPEED, min_size=1, max_size=20)
# Far enough from both ends of the range that a factor of 2**100 is exact.
SCALABLE = st.lists(st.one_of(st.just(0.0), st.floats(1e-200, 1e200)), min_size=1, max_size=20)


def exact_shares(n: int, speeds: list[float]) -> list[Fraction]:
    total = sum(map(Fraction, speeds))
    return [n * Fraction(speed) / total if total else Fraction(n, len(speeds)) for speed in speeds]


@given(COUNTS, ANY_SPEEDS)
@settings(deadline=None)
def test_shares_are_whole_sum_to_n_and_are_within_one_of_the_exact_ones(n: int, speeds: list[float]) -> None:
    shares = split_batch(n, speeds)
    assert sum(shares) == n
    for share, exact in zip(shares, exact_shares(n, speeds), strict=True):
        assert type(share) is int
        assert share >= 0
        assert abs(share - exact) < 1


@given(st.integers(0, 50), ANY_SPEEDS)
@settings(deadline=None)
def test_the_largest_remainders_are_rounded_up_ties_to_the_lower_index(n: int, speeds: list[float]) -> None:
    exact = exact_shares(n, speeds)
    up: list[tuple[Fraction, int]] = []
    down: list[tuple[Fraction, int]] = []
    for index, (share, target) in enumerate(zip(split_batch(n, speeds), exact, strict=True)):
        (up if share > target else down).append((target - math.floor(target), -index))
    # A whole share is never rounded, so it does not compete.
    assert not up or min(up) > max((rank for rank in down if rank[0]), default=(Fraction(0), 0))


@given(COUNTS, ANY_SPEEDS, st.data())
@settings(deadline=None)
def test_a_faster_worker_never_gets_less(n: int, speeds: list[float], data: st.DataObject) -> None:
    worker = data.draw(st.integers(0, len(speeds) - 1))
    faster = speeds.copy()
    faster[worker] = data.draw(st.floats(speeds[worker], 1.7e308))
    assert split_batch(n, faster)[worker] >= split_batch(n, speeds)[worker]


@given(COUNTS, SCALABLE, st.integers(-100, 100))
@settings(deadline=None)
def test_the_unit_of_speed_does_not_matter(n: int, speeds: list[float], exponent: int) -> None:
    assert split_batch(n, [math.ldexp(speed, exponent) for speed in speeds]) == split_batch(n, speeds)


@given(COUNTS, st.integers(1, 300), ANY_SPEED)
@settings(deadline=None)
def test_equal_speeds_differ_by_at_most_one_the_first_get_more(n: int, workers: int, speed: float) -> None:
    share, more = divmod(n, workers)
    assert split_batch(n, [speed] * workers) == [share + 1] * more + [share] * (workers - more)


@pytest.mark.parametrize(
    "n, speeds, shares",
    [
        (10, [1.0], [10]),
        (0, [1.0, 2.0], [0, 0]),
        (10, [3.0, 1.0], [8, 2]),
        (10, [1.0, 3.0], [3, 7]),
        (1, [1.0, 1.0, 1.0], [1, 0, 0]),
        (7, [0.0, 0.0, 0.0], [3, 2, 2]),
        (7, [0.0, 5.0], [0, 7]),
        (7, [1e308, 1e308, 1e308], [3, 2, 2]),
        (7, [1e308, 1e-308], [7, 0]),
        (9, [1, 2], [3, 6]),
        (4, [1.0, 1.0, 1.0, 0.1], [2, 1, 1, 0]),
    ],
)
def test_known_splits(n: int, speeds: list[float], shares: list[int]) -> None:
    assert batchopt.split_batch(n, speeds) == shares


@pytest.mark.parametrize(
    "n, speeds, message",
    [
        (-1, [1.0], r"`n` must be >= 0, got -1"),
        (3, [], r"`speeds` must have at least one entry"),
        (3, [1.0, -0.5], r"`speeds` must be finite and >= 0, got -0\.5 at index 1"),
        (3, [math.inf, 1.0], r"got inf at index 0"),
        (3, [1.0, 1.0, math.nan], r"got nan at index 2"),
    ],
)
def test_impossible_splits_are_refused(n: int, speeds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(n, speeds)
