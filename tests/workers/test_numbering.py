from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchopt_workers.data.batch import Numbering

THREE = Numbering(("pde", "bc", "data"), (5, 1, 3))


@pytest.mark.parametrize(
    "samples, within",
    [
        (range(0, 5), {"pde": range(0, 5)}),
        (range(4, 7), {"pde": range(4, 5), "bc": range(0, 1), "data": range(0, 1)}),
        (range(7, 9), {"data": range(1, 3)}),
        (range(6, 6), {}),
    ],
    ids=["one term", "all three", "the last", "nothing"],
)
def test_samples_are_found_within_their_terms(samples: range, within: dict[str, range]) -> None:
    assert THREE.within(samples) == within


def test_without_terms_there_is_nothing_to_name() -> None:
    alone = Numbering((None,), (9,))
    assert alone.within(range(2, 4)) == {}
    assert list(alone.split(range(2, 4))) == [(0, range(2, 4))]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_each_sample_is_in_one_term_and_at_its_position(sizes: list[int], data: st.DataObject) -> None:
    numbering = Numbering(tuple(map(str, range(len(sizes)))), tuple(sizes))
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    found = [numbering.position(term, part) for term, part in numbering.split(range(start, stop))]
    assert [index for part in found for index in part] == list(range(start, stop))
