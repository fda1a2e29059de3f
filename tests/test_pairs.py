"""Each pair is in the cases that every change runs."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.pairs import covering


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_pair_is_covered(sizes: list[int]) -> None:
    rows = [*product(*map(range, sizes))]
    some = covering(rows)
    for one, two in combinations(range(len(sizes)), 2):
        assert {(row[one], row[two]) for row in rows} == {(row[one], row[two]) for row in some}
    assert [row for row in rows if row in some] == some


def test_the_other_cases_are_left() -> None:
    assert len(covering(product(range(5), range(3), range(2)))) == 15
