"""Which tests are run: `scripts/check` chooses those that a change may break."""

from __future__ import annotations

import pytest

from scripts.check import choose


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/test_split.py", ["tests/test_split.py"]),
        ("README.md", ["tests/test_docs.py"]),
        ("workers/batchopt_workers/evaluate/tree.py", ["tests/workers/test_tree.py", "tests/test_reduce.py"]),
        ("batchopt/backends/process/scheduler.py", ["tests/backends/test_process_scheduler.py"]),
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
