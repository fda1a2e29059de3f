"""NIST's regression problems are typed as they were published."""

from __future__ import annotations

import pytest
import torch

from batchopt import LevenbergMarquardt
from batchopt.optim.minimizer import Status
from benchmarks.nist_problems import Regression, read_problems

PROBLEMS = {problem.name: problem for problem in read_problems()}
# Its squares sum up to 1.4e-25, to which the 11 certified digits of its parameters add more.
EXACT = "Lanczos1"


def squares(problem: Regression, b: torch.Tensor) -> float:
    return float(problem.residuals(b).square().sum())


@pytest.mark.parametrize("problem", [p for p in PROBLEMS.values() if p.name != EXACT], ids=lambda p: p.name)
def test_the_certified_parameters_have_the_certified_sum_of_squares(problem: Regression) -> None:
    assert squares(problem, problem.certified) == pytest.approx(problem.squares, rel=1e-9)


def test_the_exact_problem_has_it_after_a_step_of_gauss_and_newton() -> None:
    problem = PROBLEMS[EXACT]
    rows = problem.jacobian(problem.certified)
    step = torch.linalg.lstsq(rows, problem.residuals(problem.certified).unsqueeze(1)).solution[:, 0]
    assert squares(problem, problem.certified) < 1e-20
    assert squares(problem, problem.certified - step) == pytest.approx(problem.squares, rel=1e-2)


@pytest.mark.rows
@pytest.mark.parametrize("name", ["BoxBOD", "Eckerle4", "Rat43"])
def test_defaults_find_six_digits_from_both_starts(name: str) -> None:
    problem = PROBLEMS[name]
    for start in problem.starts:
        b = torch.nn.Parameter(start.clone())
        optimizer = LevenbergMarquardt([b])
        optimizer.step(lambda: problem.predict(b, problem.x) - problem.y)  # noqa: B023
        assert problem.digits(b.detach()) > 6
        # where f has no digits left, the processor's rounding decides which of the two comes first
        assert optimizer.result is not None and optimizer.result.status in (Status.CHANGE, Status.NO_DECREASE)
