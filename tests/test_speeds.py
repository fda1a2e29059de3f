"""Speeds: how they are estimated, and when the shares no longer fit them."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import BatchOptimizer, Worker
from batchopt._mapreduce.plan import split_batch
from batchopt._mapreduce.speeds import LARGEST_RATIO, Speeds

RATES = st.floats(1e-3, 1e9)


def test_what_is_not_measured_counts_as_the_median_and_keeps_its_speed_and_what_is_fixed_never_changes() -> None:
    for values, relative in (((None,) * 3, [1.0, 1.0, 1.0]), ((10.0, None, 30.0, 20.0), [10.0, 20.0, 30.0, 20.0])):
        assert not Speeds(values).measured and Speeds(values).relative == relative
    assert Speeds.unknown(3) == Speeds((None,) * 3)
    assert Speeds((50.0, 30.0, None)).observed([0, 10, 0], [1.0, 0.0, 1.0]).values == (50.0, 30.0, None)
    speeds = Speeds((1.0, 1000.0, 0.0), fixed=True)
    assert speeds.measured and speeds.relative == [1.0, 1000.0, 0.0]
    assert speeds.observed([5, 5, 5], [1.0, 1.0, 1.0]) == speeds


def test_an_absent_worker_gets_nothing_and_keeps_its_estimate() -> None:
    speeds = Speeds((2.0, 8.0, None)).without([1])
    assert speeds.relative == [2.0, 0.0, 5.0]
    assert speeds.observed([2, 0, 2], [1.0, 0.0, 1.0]).relative == [2.0, 0.0, 2.0]
    assert speeds.makespan([1, 1, 1]) == math.inf and speeds.makespan([4, 0, 5]) == 2.0
    assert speeds.without([]).relative == [2.0, 8.0, 5.0]
    assert not speeds.measured and Speeds((1.0, None)).without([1]).measured
    assert Speeds((1.0, 3.0), fixed=True).without([0]).relative == [0.0, 3.0]


@given(st.lists(RATES, min_size=1, max_size=10))
@settings(deadline=None)
def test_no_worker_is_starved_by_one_measurement(rates: list[float]) -> None:
    middle = statistics.median(rates)
    for rate, relative in zip(rates, Speeds(tuple(rates)).relative, strict=True):
        assert middle / LARGEST_RATIO <= relative <= middle * LARGEST_RATIO
        if middle / LARGEST_RATIO <= rate <= middle * LARGEST_RATIO:
            assert relative == rate


def test_the_estimate_is_the_median_of_the_last_measurements() -> None:
    speeds = Speeds.unknown(2).observed([100, 30], [2.0, 1.0])
    assert speeds.values == (50.0, 30.0)
    assert speeds.measured
    for seconds in (2.0, 20.0, 2.0):  # one is spoilt
        speeds = speeds.observed([100, 30], [seconds, 1.0])
        assert speeds.values[1] == 30.0
    assert speeds.values[0] == 50.0


def test_a_worker_that_has_become_slow_is_seen_after_three_evaluations() -> None:
    speeds = Speeds.unknown(1)
    for _ in range(20):
        speeds = speeds.observed([100], [1.0])
    for expected in (100.0, 100.0, 50.0, 50.0):
        speeds = speeds.observed([100], [2.0])
        assert speeds.values == (expected,)


def test_workers_that_come_have_no_measurements_and_those_that_stay_keep_theirs() -> None:
    speeds = Speeds.unknown(2).observed([100, 30], [1.0, 1.0]).resized(3).observed([0, 10, 5], [1.0, 1.0, 1.0])
    assert speeds.recent == ((100.0,), (30.0, 10.0), (5.0,))
    assert Speeds((7.0,)).observed([5], [1.0]).recent == ((7.0, 5.0),)  # as from a checkpoint


@given(RATES, RATES)
@settings(deadline=None)
def test_the_estimate_reaches_a_steady_speed(before: float, now: float) -> None:
    speeds = Speeds((before,))
    for _ in range(100):
        speeds = speeds.observed([1], [1 / now])
    assert speeds.values[0] == pytest.approx(now, rel=1e-9)


@given(st.integers(0, 10_000), st.lists(RATES, min_size=1, max_size=10))
@settings(deadline=None)
def test_no_split_is_faster_than_the_shortest(n: int, rates: list[float]) -> None:
    speeds = Speeds(tuple(rates))
    assert speeds.makespan(split_batch(n, speeds.relative)) >= speeds.shortest(n) * (1 - 1e-12)


@pytest.mark.parametrize("shares, seconds", [([50, 50], 50 / 3), ([54, 46], 18.0), ([100, 0], 100 / 3), ([0, 0], 0.0)])
def test_the_slowest_worker_is_waited_for_also_for_ever(shares: list[int], seconds: float) -> None:
    speeds = Speeds((3.0, 3.0))
    assert speeds.makespan(shares) == pytest.approx(seconds)
    assert speeds.shortest(sum(shares)) == pytest.approx(sum(shares) / 6)
    stopped = Speeds((0.0, 1.0), fixed=True)
    assert stopped.makespan([1, 99]) == math.inf
    assert stopped.makespan([0, 100]) == stopped.shortest(100) == 100
    assert Speeds((1.0, 1.0)).without([0, 1]).shortest(5) == 0.0


def test_a_worker_that_was_too_slow_to_get_anything_is_tried_again() -> None:
    """Else one that was held up once would idle for good."""
    speeds = Speeds((100.0, 100.0, 0.2), recent=((100.0,), (100.0,), (0.2,)))
    assert split_batch(100, speeds.relative)[2] == 0
    for _ in range(200):
        assert speeds.relative[2] <= 100.0
        speeds = speeds.rested([2])
    assert speeds.values == (100.0, 100.0, 100.0)
    assert speeds.observed([0, 0, 1], [0.0, 0.0, 0.02]).values[2] == 50.0  # what was measured before says nothing now


def test_only_what_is_slow_without_work_recovers() -> None:
    speeds = Speeds((100.0, 300.0, 50.0, None))
    assert speeds.rested([0, 1, 3]).values == (100.0, 300.0, 50.0, None)
    assert speeds.without([2]).rested([2]).values == speeds.values
    assert Speeds((1.0, 9.0, 9.0), fixed=True).rested([0]).values == (1.0, 9.0, 9.0)


# ---- workers that become slow in the middle of a run are measured, whether or not what they did counts


DATA = torch.linspace(-1, 1, 240).view(120, 2), torch.linspace(0, 1, 120).view(120, 1)


def slow_loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """So many seconds for each sample, in a worker that was sent."""
    time.sleep(len(x) * getattr(time, "batchopt_test_seconds", 0.001))
    return nn.functional.mse_loss(module(x), y)


def become(worker: Worker, seconds: dict[int, float]) -> None:
    vars(time)["batchopt_test_seconds"] = seconds.get(worker.rank, 0.001)


def hook(worker: Worker, sample: Any) -> None:
    """Hooks make the first evaluation the measurement."""


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True])
def test_a_worker_whose_share_is_always_taken_over_is_measured(hooked: bool) -> None:
    options: dict[str, Any] = {"parallelize": 4, "prehook": hook if hooked else None, "check_cut": False}
    with BatchOptimizer(nn.Linear(2, 1), loss_fn=slow_loss, optimizer=None, **options) as opt:
        if not hooked:
            opt.load(*DATA)
            opt.evaluate()
        opt.run_on_workers(become, {3: 0.008})
        if hooked:
            opt.load(*DATA)
        expected = nn.functional.mse_loss(opt.module(DATA[0]), DATA[1]).item()
        for _ in range(25):
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-5)
            speeds = [worker.speed for worker in opt.workers]
            if speeds[3] is not None and speeds[3] < 0.4 * min(speed or 0.0 for speed in speeds[:3]):
                break
        else:
            raise AssertionError(f"worker 3 counts as fast as the others: {speeds}")
        before = opt.workers[3].samples
        while opt.workers[3].samples == before:  # its smaller share counts
            opt.evaluate()
        opt.run_on_workers(become, {})
        for _ in range(100):  # and it is fast again
            opt.evaluate()
            recovered = [worker.speed or 0.0 for worker in opt.workers]
            if recovered[3] > 0.6 * max(recovered):
                break
        else:
            raise AssertionError(f"worker 3 counts as slow: {recovered}")
