from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchopt_workers.map.weighting import Weighting

# 0 and numbers of very different magnitude, as class weights are.
DENOMINATORS = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=50)


def running_sum(denominators: list[float]) -> torch.Tensor:
    return torch.tensor([0.0, *denominators], dtype=torch.float64).cumsum(0)


def weighting_of(denominators: list[float]) -> Weighting:
    return Weighting("mean", len(denominators), running_sum(denominators))


def parts_of(size: int, data: st.DataObject) -> list[tuple[int, int]]:
    inner = data.draw(st.sets(st.integers(0, size)))
    return list(pairwise([0, *sorted(inner), size]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_whole_batch_weighs_exactly_one_for_every_size(reduction: str) -> None:
    assert [size for size in range(1, 201) if Weighting(reduction, size).of(0, size) != 1.0] == []


@given(DENOMINATORS.filter(any))
def test_the_whole_batch_weighs_exactly_one_whatever_its_denominators(denominators: list[float]) -> None:
    assert weighting_of(denominators).of(0, len(denominators)) == 1.0


@given(st.integers(1, 10**6), st.data())
def test_the_parts_of_a_mean_sum_to_one(size: int, data: st.DataObject) -> None:
    weighting = Weighting("mean", size)
    assert sum(weighting.of(start, stop) for start, stop in parts_of(size, data)) == pytest.approx(1.0, rel=1e-13)


@given(DENOMINATORS.filter(any), st.data())
def test_the_parts_of_a_mean_over_denominators_sum_to_one_and_each_counts_its_own(
    denominators: list[float], data: st.DataObject
) -> None:
    weighting, total = weighting_of(denominators), math.fsum(denominators)
    parts = parts_of(len(denominators), data)
    assert sum(weighting.of(start, stop) for start, stop in parts) == pytest.approx(1.0, rel=1e-13)
    for start, stop in parts:
        share = math.fsum(denominators[start:stop]) / total
        assert weighting.of(start, stop) == pytest.approx(share, rel=1e-13, abs=1e-13)


@given(DENOMINATORS, st.booleans(), st.data())
def test_every_part_of_a_sum_weighs_one(denominators: list[float], with_running: bool, data: st.DataObject) -> None:
    weighting = Weighting("sum", len(denominators), running_sum(denominators) if with_running else None)
    assert {weighting.of(start, stop) for start, stop in parts_of(len(denominators), data)} == {1.0}


@given(st.integers(1, 20), st.data())
def test_where_all_denominators_are_zero_every_weight_is_no_number(size: int, data: st.DataObject) -> None:
    weighting = weighting_of([0.0] * size)
    assert all(math.isnan(weighting.of(start, stop)) for start, stop in parts_of(size, data))


def test_samples_that_count_nothing_weigh_exactly_zero() -> None:
    weighting = weighting_of([0.1, 0.0, 0.0, 0.7, 0.0])
    assert [weighting.of(start, stop) for start, stop in ((1, 2), (1, 3), (4, 5))] == [0.0, 0.0, 0.0]


def test_no_samples_weigh_exactly_zero_in_a_mean() -> None:
    assert Weighting("mean", 3).of(2, 2) == 0.0
    assert weighting_of([0.1, 0.2, 0.7]).of(2, 2) == 0.0


def test_a_mean_divides_by_the_sum_of_its_denominators_and_a_sum_by_one() -> None:
    assert Weighting("mean", 7).divisor == 7.0
    assert Weighting("mean", 2, running_sum([0.0, 4.0]), divided_once=True).of(0, 1) == 0.25
    assert math.isnan(Weighting("mean", 1, running_sum([0.0]), divided_once=True).of(0, 1))
    assert weighting_of([0.5, 0.0, 2.0]).divisor == 2.5
    assert Weighting("sum", 7).divisor == 1.0
