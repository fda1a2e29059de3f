"""Speeds: how they are estimated, and when the shares no longer fit them."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.speeds import LARGEST_RATIO, Speeds
from batchopt.split import split_batch

RATES = st.floats(1e-3, 1e9)


def test_nothing_is_known_at_first_and_all_workers_count_the_same() -> None:
    speeds = Speeds.unknown(3)
    assert not speeds.measured
    assert speeds.relative() == [1.0, 1.0, 1.0]


def test_a_worker_not_measured_counts_as_the_median_of_the_others() -> None:
    speeds = Speeds((10.0, None, 30.0, 20.0))
    assert not speeds.measured
    assert speeds.relative() == [10.0, 20.0, 30.0, 20.0]


def test_an_absent_worker_gets_nothing_and_keeps_its_estimate() -> None:
    speeds = Speeds((2.0, 8.0, None)).without([1])
    assert speeds.relative() == [2.0, 0.0, 5.0]
    assert speeds.observed([2, 0, 2], [1.0, 0.0, 1.0]).relative() == [2.0, 0.0, 2.0]
    assert speeds.improves_on([1, 1, 1]) and not Speeds((1.0, 1.0)).without([1]).improves_on([4, 0])
    assert speeds.without([]).relative() == [2.0, 8.0, 5.0]
    assert not speeds.measured and Speeds((1.0, None)).without([1]).measured
    assert Speeds((1.0, 3.0), fixed=True).without([0]).relative() == [0.0, 3.0]


@given(st.lists(RATES, min_size=1, max_size=10))
@settings(deadline=None)
def test_no_worker_is_starved_by_one_measurement(rates: list[float]) -> None:
    middle = statistics.median(rates)
    for rate, relative in zip(rates, Speeds(tuple(rates)).relative(), strict=True):
        assert middle / LARGEST_RATIO <= relative <= middle * LARGEST_RATIO
        if middle / LARGEST_RATIO <= rate <= middle * LARGEST_RATIO:
            assert relative == rate


def test_fixed_speeds_are_used_as_given_and_never_change() -> None:
    speeds = Speeds((1.0, 1000.0, 0.0), fixed=True)
    assert speeds.measured
    assert speeds.observed([5, 5, 5], [1.0, 1.0, 1.0]) == speeds
    assert speeds.relative() == [1.0, 1000.0, 0.0]


def test_the_first_measurement_counts_in_full_and_later_ones_by_half() -> None:
    once = Speeds.unknown(2).observed([100, 30], [2.0, 1.0])
    assert once.values == (50.0, 30.0)
    assert once.measured
    assert once.observed([100, 30], [1.0, 1.0]).values == (75.0, 30.0)


def test_a_worker_that_idled_or_was_not_timed_keeps_its_speed() -> None:
    assert Speeds((50.0, 30.0, None)).observed([0, 10, 0], [1.0, 0.0, 1.0]).values == (50.0, 30.0, None)


@given(RATES, RATES)
@settings(deadline=None)
def test_the_estimate_reaches_a_steady_speed(before: float, now: float) -> None:
    speeds = Speeds((before,))
    for _ in range(100):
        speeds = speeds.observed([1], [1 / now])
    assert speeds.values[0] == pytest.approx(now, rel=1e-9)


@given(st.integers(0, 10_000), st.lists(RATES, min_size=1, max_size=10))
@settings(deadline=None)
def test_nothing_improves_on_the_split_by_the_same_speeds(n: int, rates: list[float]) -> None:
    speeds = Speeds(tuple(rates))
    assert not speeds.improves_on(split_batch(n, speeds.relative()))


@pytest.mark.parametrize(
    "shares, worthwhile",
    [
        ([50, 50], False),
        ([54, 46], False),  # 7 % to gain
        ([56, 44], True),  # 11 % to gain
        ([44, 56], True),
        ([100, 0], True),
        ([1, 0], False),  # one sample cannot be split
        ([0, 0], False),
    ],
)
def test_a_new_split_must_save_a_tenth(shares: list[int], worthwhile: bool) -> None:
    assert Speeds((3.0, 3.0)).improves_on(shares) is worthwhile


def test_samples_at_a_worker_of_speed_zero_are_worth_moving() -> None:
    speeds = Speeds((0.0, 1.0), fixed=True)
    assert speeds.improves_on([1, 99])
    assert not speeds.improves_on([0, 100])
