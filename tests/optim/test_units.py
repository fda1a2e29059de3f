"""The units of f and of the parameters change no decision, and no bit but exponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchopt import Iteration, Result, Status
from benchmarks.problems import PROBLEMS
from tests.optim.kinds import (
    KINDS,
    NO_END,
    OF_SQUARES,
    SEARCHES,
    Function,
    Problem,
    logistic,
    rosenbrock,
    start,
)
from tests.optim.kinds import valley as residuals_of_rosenbrock
from tests.optim.test_levenberg_marquardt import START, VALLEY, decay
from tests.optim.test_ssbroyden import product, small

NAMED = {problem.name: problem for problem in PROBLEMS}
FUNCTIONS: dict[str, tuple[Function, torch.Tensor]] = {
    "Rosenbrock": (rosenbrock, start(7)),
    "logistic": (logistic, start(6)),
    "from zero": (logistic, torch.zeros(6, dtype=torch.float64)),
    "product": (product, small(2)),
    **{
        name: (NAMED[name].function, torch.tensor(NAMED[name].start, dtype=torch.float64))
        for name in ("Meyer", "Osborne 1")
    },
}
SQUARES: dict[str, tuple[Function, torch.Tensor]] = {
    "decay": (decay, START),
    "valley": (residuals_of_rosenbrock, VALLEY),
}
# powers of two: 1e50 is 2 ** 166
powers = st.integers(-166, 166)
Seen = tuple[Result, list[torch.Tensor]]


def scaled(function: Callable[[torch.Tensor], torch.Tensor], of_f: int, of_x: int) -> Any:
    """The function in other units."""
    return lambda x: function(x * 2.0**-of_x) * 2.0**of_f


def run(problem: Any) -> Seen:
    points: list[torch.Tensor] = []

    def look(_: Iteration) -> None:
        points.append(problem.x)

    problem.optimizer.callback = look
    return problem.step(), points


def same(one: Seen, other: Seen, of_f: int, of_x: int) -> None:
    """Each iterate, and all that the result says."""
    (result, points), (plain, expected) = one, other
    assert (result.status, result.iterations, result.evaluations) == (plain.status, plain.iterations, plain.evaluations)
    assert (result.number, result.not_finite, result.forgotten) == (plain.number, plain.not_finite, plain.forgotten)
    for point, unscaled in zip(points, expected, strict=True):
        assert torch.equal(point * 2.0**-of_x, unscaled)
    assert result.f * 2.0**-of_f == plain.f and result.change * 2.0**-of_x == plain.change
    assert result.gradient * 2.0 ** (of_x - of_f) == plain.gradient


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", SEARCHES)
@given(powers, powers)
@example(166, -166)
@example(-166, 166)
@settings(deadline=None, max_examples=3)
def test_of_descent(kind: str, function: str, of_f: int, of_x: int) -> None:
    plain, x = FUNCTIONS[function]
    options = {"max_iter": 40, "tolerance_change": 0.0}
    expected = run(Problem(KINDS[kind], plain, x, tolerance_grad=1e-9, **options))
    tolerance = 1e-9 * 2.0 ** (of_f - of_x)
    moved = Problem(KINDS[kind], scaled(plain, of_f, of_x), x * 2.0**of_x, tolerance_grad=tolerance, **options)
    same(run(moved), expected, of_f, of_x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_SQUARES)
@pytest.mark.parametrize("residuals", SQUARES)
@given(st.integers(-83, 83), powers)  # f is the square of residuals
@example(83, -166)
@example(-83, 166)
@settings(deadline=None, max_examples=3)
def test_of_levenberg_marquardt(residuals: str, kind: str, of_r: int, of_x: int) -> None:
    plain, x = SQUARES[residuals]
    expected = run(Problem(KINDS[kind], plain, x, max_iter=8, **NO_END))
    moved = Problem(KINDS[kind], scaled(plain, of_r, of_x), x * 2.0**of_x, max_iter=8, **NO_END)
    same(run(moved), expected, 2 * of_r, of_x)


@pytest.mark.rows
@pytest.mark.parametrize("of_f", [-100, -40, 60])
@pytest.mark.parametrize("kind", SEARCHES)
def test_in_single_precision_squares_of_gradients_may_be_no_numbers(kind: str, of_f: int) -> None:
    options = {"max_iter": 500, "tolerance_grad": 1e-4 * 2.0**of_f, "tolerance_change": 0.0}
    problem = Problem(KINDS[kind], scaled(logistic, of_f, 0), start(6).float(), **options)
    assert problem.step().status is Status.GRADIENT and problem.result.evaluations < 200


@pytest.mark.rows
@pytest.mark.parametrize("of_x", [-100, 64])
@pytest.mark.parametrize("kind", [kind for kind in SEARCHES if kind != "ssbroyden"])  # whose matrix has no such element
def test_in_single_precision_steps_may_be_no_numbers(kind: str, of_x: int) -> None:
    """The first one is 2^-200 or 2^128, times a direction of 2^100 or 2^-64."""
    options = {"max_iter": 500, "tolerance_grad": 1e-3 * 2.0**-of_x, "tolerance_change": 0.0}
    problem = Problem(KINDS[kind], scaled(rosenbrock, 0, of_x), start(4).float() * 2.0**of_x, **options)
    assert problem.step().status is Status.GRADIENT and problem.result.forgotten == ()
