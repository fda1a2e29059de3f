"""Speeds: how they are estimated, and when the shares no longer fit them."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import BatchOptimizer, Worker
from batchopt._mapreduce.plan import choose_chunk_size, make_plan, replan, split_batch
from batchopt._mapreduce.speeds import Speeds
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


def test_the_estimate_is_the_median_of_the_last_measurements() -> None:
    speeds = Speeds.unknown(2).observed([100, 30], [2.0, 1.0])
    assert speeds.values == (50.0, 30.0)
    assert speeds.measured
    for seconds in (2.0, 20.0, 2.0):  # one is spoilt
        speeds = speeds.observed([100, 30], [seconds, 1.0])
        assert speeds.values[1] == 30.0
    assert speeds.values[0] == 50.0


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


def test_a_plan_that_is_new_gives_way_only_to_one_that_is_much_better() -> None:
    plan = make_plan(100, None, Speeds((1.0, 1.0)))
    shares = []
    for _ in range(6):
        plan = replan(plan, None, Speeds((1.0, 1.1)))  # 5 % to gain
        shares.append(plan.samples())
    assert shares == [[50, 50]] * 4 + [[48, 52]] * 2
    assert replan(make_plan(100, None, Speeds((1.0, 1.0))), None, Speeds((1.0, 1.3))).samples() == [43, 57]
