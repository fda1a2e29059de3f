"""Plans: the chunks tile the batch, and every chunk has one worker."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt._mapreduce.plan import DETERMINISTIC_CHUNKS, NEW, choose_chunk_size, make_plan, replan
from batchopt._mapreduce.speeds import Speeds
from batchopt_workers.process.messages import Order

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
