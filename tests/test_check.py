"""Which tests are run: `scripts/check` chooses those that a change may break."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.check import choose
from tests.pairs import covering


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/test_split.py", ["tests/test_split.py"]),
        ("README.md", ["tests/test_docs.py"]),
        ("workers/batchopt_workers/evaluate/tree.py", ["tests/workers/test_tree.py", "tests/test_reduce.py"]),
        ("batchopt/backends/process/roster.py", ["tests/backends/test_process_roster.py"]),
        ("batchopt/_engine/engine.py", ["tests/faults/test_matrix.py", "tests/test_model.py"]),
        ("batchopt/backends/nodes/placing.py", ["tests/backends/test_cluster.py", "tests/backends/test_contract.py"]),
        ("batchopt/optim/lbfgs.py", ["tests/optim/test_lbfgs.py"]),
        ("tests/workloads.py", ["tests/test_exact.py"]),
        ("batchopt/optimizer.py", ["tests/test_exact.py"]),
    ],
)
def test_a_changed_file_has_these_tests_among_others(changed: str, tests: list[str]) -> None:
    assert set(tests) <= set(choose([changed]))


def test_the_closest_tests_come_first() -> None:
    chosen = choose(["batchopt/_mapreduce/split.py", "README.md"])
    assert chosen[0] == "tests/test_split.py" and chosen[-1] == "tests/test_docs.py"


# ---- of products of many factors each pair is in the cases that every change runs


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_pair_is_covered(sizes: list[int]) -> None:
    rows = [*product(*map(range, sizes))]
    some = covering(rows)
    for one, two in combinations(range(len(sizes)), 2):
        assert {(row[one], row[two]) for row in rows} == {(row[one], row[two]) for row in some}
    assert [row for row in rows if row in some] == some


def test_the_other_cases_are_left() -> None:
    assert len(covering(product(range(5), range(3), range(2)))) == 15
