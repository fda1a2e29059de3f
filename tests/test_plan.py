"""Plans: the chunks tile the batch, and every chunk has one worker."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt.plan import Objective, follow, make_plan
from batchopt.speeds import Speeds

SIZES = st.integers(1, 500)
REDUCTIONS = st.sampled_from(["mean", "sum"])
CHUNK_SIZES = st.one_of(st.none(), st.integers(1, 600))
OBJECTIVES = st.builds(lambda n, how, chunk: Objective(n, how, None, chunk), SIZES, REDUCTIONS, CHUNK_SIZES)
SPEEDS = st.lists(st.one_of(st.none(), st.floats(0.01, 1000)), min_size=1, max_size=9).map(lambda v: Speeds(tuple(v)))


@given(OBJECTIVES, SPEEDS)
@settings(deadline=None)
def test_chunks_tile_the_batch_and_none_is_empty(objective: Objective, speeds: Speeds) -> None:
    cut = make_plan(objective, speeds).cut
    assert cut.bounds[0] == 0
    assert cut.bounds[-1] == cut.size == objective.size
    assert all(start < stop for start, stop in pairwise(cut.bounds))
    assert cut.chunks == len(cut.weights) == len(cut.bounds) - 1
    if objective.reduction == "mean":
        assert math.fsum(cut.weights) == pytest.approx(1)


@given(OBJECTIVES, SPEEDS)
@settings(deadline=None)
def test_every_chunk_is_ordered_once_and_in_rank_order(objective: Objective, speeds: Speeds) -> None:
    plan = make_plan(objective, speeds)
    orders = plan.orders(evaluation=7, step=3)
    assert len(orders) == len(speeds.values)
    ordered = [chunk for order in orders if order for chunk in range(order.first, order.last)]
    assert ordered == list(range(plan.cut.chunks))
    assert all((order.evaluation, order.step) == (7, 3) for order in orders if order)
    assert all(order.last > order.first for order in orders if order)


@given(OBJECTIVES, SPEEDS)
@settings(deadline=None)
def test_samples_sum_to_n_and_only_idle_workers_have_none(objective: Objective, speeds: Speeds) -> None:
    plan = make_plan(objective, speeds)
    assert sum(plan.samples()) == objective.size
    for samples, order in zip(plan.samples(), plan.orders(0, 0), strict=True):
        assert (samples == 0) == (order is None)


@given(SIZES, st.integers(1, 600), SPEEDS)
@settings(deadline=None)
def test_with_a_chunk_size_the_data_alone_fixes_the_cut(n: int, chunk_size: int, speeds: Speeds) -> None:
    objective = Objective(n, "mean", None, chunk_size)
    cut = make_plan(objective, speeds).cut
    assert cut == make_plan(objective, Speeds.unknown(1)).cut
    lengths = [stop - start for start, stop in pairwise(cut.bounds)]
    assert all(length == chunk_size for length in lengths[:-1])
    assert lengths[-1] <= chunk_size


def test_without_a_chunk_size_each_worker_gets_one_chunk_by_its_speed() -> None:
    plan = make_plan(Objective(100, "mean"), Speeds((1.0, 3.0)))
    assert plan.cut.bounds == (0, 25, 100)
    assert plan.cut.weights == (0.25, 0.75)
    assert plan.shares == (1, 1)


def test_workers_beyond_the_samples_idle() -> None:
    plan = make_plan(Objective(2, "sum"), Speeds.unknown(4))
    assert plan.samples() == [1, 1, 0, 0]
    assert plan.orders(0, 0)[2:] == [None, None]
    assert plan.cut.weights == (1.0, 1.0)


@given(OBJECTIVES, SPEEDS)
@settings(deadline=None)
def test_a_plan_made_by_the_present_speeds_is_followed_unchanged(objective: Objective, speeds: Speeds) -> None:
    plan = make_plan(objective, speeds)
    assert follow(plan, objective, speeds) == plan


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_fixed_speeds_never_change_the_plan(chunk_size: int | None) -> None:
    objective = Objective(100, "mean", None, chunk_size)
    plan = make_plan(objective, Speeds.unknown(2))
    assert follow(plan, objective, Speeds((1.0, 10.0), fixed=True)) is plan


def test_fixed_chunks_only_change_hands() -> None:
    objective = Objective(100, "mean", None, 10)
    plan = make_plan(objective, Speeds.unknown(2))
    after = follow(plan, objective, Speeds((1.0, 4.0)))
    assert after.cut is plan.cut
    assert (plan.shares, after.shares) == ((5, 5), (2, 8))


def test_free_chunks_are_cut_anew() -> None:
    objective = Objective(100, "mean")
    after = follow(make_plan(objective, Speeds.unknown(2)), objective, Speeds((1.0, 4.0)))
    assert after == make_plan(objective, Speeds((1.0, 4.0)))
    assert after.samples() == [20, 80]
