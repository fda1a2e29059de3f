"""Speeds: how they are estimated, and when the shares no longer fit them."""

from __future__ import annotations

import math
import statistics
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import BatchOptimizer, Worker
from batchopt._mapreduce.plan import DETERMINISTIC_CHUNKS, NEW, choose_chunk_size, make_plan, replan, split_batch
from batchopt._mapreduce.speeds import LARGEST_RATIO, Speeds
from batchopt_workers.wire.orders import Order

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


# ---- the cut of a batch into chunks, and who gets them


SIZES = st.integers(1, 500)
CHUNK_SIZES = st.one_of(st.none(), st.integers(1, 600))
SPEEDS = st.lists(st.one_of(st.none(), st.floats(0.01, 1000)), min_size=1, max_size=9).map(lambda v: Speeds(tuple(v)))


@given(SIZES, CHUNK_SIZES, SPEEDS)
@settings(deadline=None)
def test_chunks_tile_the_batch_and_each_is_ordered_once_in_rank_order(
    n: int, chunk_size: int | None, speeds: Speeds
) -> None:
    plan = make_plan(n, chunk_size, speeds)
    assert (plan.cut.bounds[0], plan.cut.bounds[-1], sum(plan.samples())) == (0, n, n)
    assert all(start < stop for start, stop in pairwise(plan.cut.bounds))  # none is empty
    assert [first == last for first, last in plan.runs] == [samples == 0 for samples in plan.samples()]
    assert len(plan.runs) == len(speeds.values)
    assert [chunk for run in plan.runs for chunk in range(*run)] == list(range(plan.cut.chunks))
    assert plan.order(evaluation=7, step=3) == Order(7, 3, 0, plan.cut.chunks)
    assert choose_chunk_size(n, chunk_size, deterministic=False) == chunk_size
    assert chunk_size is None or choose_chunk_size(n, chunk_size, deterministic=True) == chunk_size


@given(SIZES, st.integers(1, 600), SPEEDS)
@settings(deadline=None)
def test_with_a_chunk_size_the_data_alone_fixes_the_cut(n: int, chunk_size: int, speeds: Speeds) -> None:
    cut = make_plan(n, chunk_size, speeds).cut
    assert cut == make_plan(n, chunk_size, Speeds.unknown(1)).cut
    lengths = [stop - start for start, stop in pairwise(cut.bounds)]
    assert all(length == chunk_size for length in lengths[:-1])
    assert lengths[-1] <= chunk_size


@given(st.integers(1, 100_000), SPEEDS)
@settings(deadline=None)
def test_where_the_bits_must_be_the_same_any_workers_get_the_same_chunks(n: int, speeds: Speeds) -> None:
    chunk_size = choose_chunk_size(n, None, deterministic=True)
    assert chunk_size is not None
    assert chunk_size >= 1
    cut = make_plan(n, chunk_size, speeds).cut
    assert cut == make_plan(n, chunk_size, Speeds.unknown(1)).cut
    assert cut.chunks <= DETERMINISTIC_CHUNKS
    assert cut.chunks >= min(n, DETERMINISTIC_CHUNKS // 2 + 1)


def test_some_plans() -> None:
    for n, chunk_size in ((1, 1), (32, 1), (33, 2), (64, 2), (1000, 32)):  # of the data alone
        assert choose_chunk_size(n, None, deterministic=True) == chunk_size
    plan = make_plan(100, None, Speeds((1.0, 3.0)))
    assert (plan.cut.bounds, plan.shares) == ((0, 25, 100), (1, 1))
    plan = make_plan(2, None, Speeds.unknown(4))
    assert (plan.samples(), plan.runs[2:], plan.cut.bounds) == ([1, 1, 0, 0], [(2, 2), (2, 2)], (0, 1, 2))


@given(SIZES, CHUNK_SIZES, SPEEDS)
@settings(deadline=None)
def test_a_plan_made_by_the_present_speeds_is_followed_unchanged(
    n: int, chunk_size: int | None, speeds: Speeds
) -> None:
    plan = make_plan(n, chunk_size, speeds)
    ages = [0]
    for _ in range(10):
        after = replan(plan, chunk_size, speeds)
        assert (after.cut, after.shares) == (plan.cut, plan.shares)
        plan = after
        ages.append(plan.age)
    assert ages == [*range(NEW), *[NEW] * (11 - NEW)] or not any(ages)  # nothing depends on it then


def test_what_only_parts_of_chunks_could_save_does_not_make_a_plan_new() -> None:
    """Nine chunks of two for two workers: five for one of them, though a half of 17 samples is less than ten."""
    plan = make_plan(17, 2, Speeds.unknown(2))
    for _ in range(NEW):
        plan = replan(plan, 2, Speeds.unknown(2))
    assert plan.samples() == [10, 7] and plan.age == NEW
    assert replan(plan, 2, Speeds.unknown(2)) is plan


def test_fixed_speeds_and_one_worker_change_nothing_fixed_chunks_change_hands_and_free_ones_are_cut_anew() -> None:
    for chunk_size in (None, 5):
        plan = make_plan(100, chunk_size, Speeds.unknown(2))
        assert replan(plan, chunk_size, Speeds((1.0, 10.0), fixed=True)) is plan
    plan = make_plan(100, 30, Speeds.unknown(1))
    assert replan(plan, 30, Speeds((10.0,))) is plan
    plan = make_plan(100, 10, Speeds.unknown(2))
    after = replan(plan, 10, Speeds((1.0, 4.0)))
    assert after.cut is plan.cut and (plan.shares, after.shares) == ((5, 5), (2, 8))
    after = replan(make_plan(100, None, Speeds.unknown(2)), None, Speeds((1.0, 4.0)))
    assert after == make_plan(100, None, Speeds((1.0, 4.0))) and after.samples() == [20, 80]


def test_a_plan_that_is_new_gives_way_only_to_one_that_is_much_better() -> None:
    plan = make_plan(100, None, Speeds((1.0, 1.0)))
    shares = []
    for _ in range(6):
        plan = replan(plan, None, Speeds((1.0, 1.1)))  # 5 % to gain
        shares.append(plan.samples())
    assert shares == [[50, 50]] * 4 + [[48, 52]] * 2
    assert replan(make_plan(100, None, Speeds((1.0, 1.0))), None, Speeds((1.0, 1.3))).samples() == [43, 57]
