"""What samples count: their part of a mean or a sum, what divides a mean, and their numbers within terms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchopt_workers.data.batch import Numbering
from batchopt_workers.map.weighting import ClassDenominators, GivenDenominators, Weighting, class_denominators

# 0 and numbers of very different magnitude, as class weights are.
DENOMINATORS = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=50)
NOTHING = nn.Identity()


def weighting_of(denominators: list[float], reduction: str = "mean", divided_once: bool = False) -> Weighting:
    running = torch.tensor([0.0, *denominators], dtype=torch.float64).cumsum(0)
    return Weighting(reduction, len(denominators), running, divided_once=divided_once)


def parts_of(size: int, data: st.DataObject) -> list[tuple[int, int]]:
    inner = data.draw(st.sets(st.integers(0, size)))
    return list(pairwise([0, *sorted(inner), size]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_whole_batch_weighs_exactly_one_for_every_size(reduction: str) -> None:
    assert [size for size in range(1, 201) if Weighting(reduction, size).of(0, size) != 1.0] == []


@given(DENOMINATORS.filter(any), st.data())
def test_the_parts_of_a_mean_over_denominators_sum_to_one_and_each_counts_its_own(
    denominators: list[float], data: st.DataObject
) -> None:
    weighting, total = weighting_of(denominators), math.fsum(denominators)
    assert weighting.of(0, len(denominators)) == 1.0
    parts = parts_of(len(denominators), data)
    assert sum(weighting.of(*part) for part in parts) == pytest.approx(1.0, rel=1e-13)
    for start, stop in parts:
        share = math.fsum(denominators[start:stop]) / total
        assert weighting.of(start, stop) == pytest.approx(share, rel=1e-13, abs=1e-13)


def test_what_counts_nothing_weighs_exactly_zero() -> None:
    weighting = weighting_of([0.1, 0.0, 0.0, 0.7, 0.0])
    assert [weighting.of(*part) for part in ((1, 2), (1, 3), (4, 5), (2, 2), (4, 4))] == [0.0] * 5
    assert Weighting("mean", 3).of(2, 2) == 0.0


@pytest.mark.parametrize("shape", [(9,), (9, 5), (9, 2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_denominators_sum_to_what_torchs_mean_divides_by(shape: tuple[int, ...], weighted: bool) -> None:
    torch.manual_seed(0)
    classes, weight = torch.randint(0, 4, shape), torch.rand(4).double() if weighted else None
    outputs = torch.randn(9, 4, *shape[1:]).double()
    mean, total = (
        nn.functional.cross_entropy(outputs, classes, weight, ignore_index=2, reduction=reduction)
        for reduction in ("mean", "sum")
    )
    each = class_denominators(classes, weight, 2)
    assert each.shape == (9,) and each.sum().item() == pytest.approx((total / mean).item(), rel=1e-12)


def test_denominators_of_chunks_are_those_of_the_whole() -> None:
    classes, weight = torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, 0.5, 4.0])
    found = ClassDenominators(weight, 2)
    each = torch.cat([found(NOTHING, None, part) for part in (classes[:3], classes[3:])])
    assert each.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert found(NOTHING, None, torch.rand(4, 3)).isnan().all()
    with pytest.raises(TypeError, match="need targets that are a tensor; got NoneType"):
        found(NOTHING, None, None)
    of_the_user = GivenDenominators(lambda x, y: [1, 2])  # any sequence
    assert of_the_user(NOTHING, None, None).tolist() == [1, 2]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_each_sample_is_in_one_term_and_at_its_position(sizes: list[int], data: st.DataObject) -> None:
    numbering = Numbering(tuple(map(str, range(len(sizes)))), tuple(sizes))
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    found = [numbering.position(term, part) for term, part in numbering.split(range(start, stop))]
    assert [index for part in found for index in part] == list(range(start, stop))
