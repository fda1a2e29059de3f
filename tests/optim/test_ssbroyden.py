"""The whole quasi-Newton matrix against its formulas, and where they alone would leave it too large."""

from __future__ import annotations

import math

import pytest
import torch

import batchopt
from tests.optim import reference
from tests.optim.kinds import Problem, logistic, start


def matrices(points: list[torch.Tensor], gradients: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The matrix that was made on the way along `points`, and how often it was made smaller because steps were
    short."""
    s, y = points[1] - points[0], gradients[1] - gradients[0]
    inverse, pace, shrunk = torch.eye(len(s), dtype=s.dtype) * (s @ y) / (y @ y), 1.0, 0
    for i in range(len(points) - 1):
        s, y = points[i + 1] - points[i], gradients[i + 1] - gradients[i]
        if i > 0:
            length = float(s.norm() / (inverse @ gradients[i]).norm())
            pace = math.exp(0.9 * math.log(pace) + 0.1 * math.log(length))
            if pace < 0.1:
                inverse, pace, shrunk = inverse * pace, 1.0, shrunk + 1
        inverse = reference.broyden(inverse, s, y)
    return inverse, shrunk


def run(problem: Problem, function: reference.Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The matrix of the optimizer, that of the formulas, and how often it was made smaller."""
    points = [x]
    problem.optimizer.callback = lambda iteration: points.append(problem.x)
    problem.step()
    gradients = [reference.value_and_gradient(function, point)[1] for point in points]
    expected, shrunk = matrices(points, gradients)
    return problem.optimizer.state_dict()["state"][0]["inverse"], expected, shrunk


def product(x: torch.Tensor) -> torch.Tensor:
    """How far a product of four matrices is from another one: flat where they are small, and steep further on."""
    width = math.isqrt(len(x) // 4)
    wanted = 10 * torch.randn(width, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: torch.Tensor = torch.linalg.multi_dot(list(x.view(4, width, width))) - wanted.to(x)
    return found.square().sum()


def small(width: int) -> torch.Tensor:
    return 0.1 * torch.randn(4 * width**2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_matrix_is_its_formulas() -> None:
    problem = Problem(batchopt.SSBroyden, logistic, start(6), max_iter=9, tolerance_change=0.0)
    found, expected, shrunk = run(problem, logistic, start(6))
    assert shrunk == 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_the_matrix_is_made_smaller_when_steps_are_short() -> None:
    problem = Problem(batchopt.SSBroyden, product, small(4), max_iter=60, tolerance_change=0.0)
    found, expected, shrunk = run(problem, product, small(4))
    assert shrunk >= 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_state_that_is_taken_in_the_middle_of_a_step_is_whole_and_changes_nothing() -> None:
    """Within a step the matrix lags behind by an update."""
    plain = Problem(batchopt.SSBroyden, product, small(4), max_iter=30, tolerance_change=0.0)
    looked_at = Problem(batchopt.SSBroyden, product, small(4), max_iter=30, tolerance_change=0.0)
    states: list[torch.Tensor] = []

    def look(_: object) -> None:
        states.append(looked_at.optimizer.state_dict()["state"][0].get("inverse", torch.empty(0)).clone())

    looked_at.optimizer.callback = look
    plain.step()
    looked_at.step()
    assert torch.equal(plain.x, looked_at.x)
    assert len(states) == 30 and torch.equal(states[-1], plain.optimizer.state_dict()["state"][0]["inverse"])
    shorter = Problem(batchopt.SSBroyden, product, small(4), max_iter=17, tolerance_change=0.0)
    shorter.step()
    assert torch.equal(states[16], shorter.optimizer.state_dict()["state"][0]["inverse"])


def test_steps_whose_squares_are_no_numbers_any_more_teach_nothing() -> None:
    """Near a minimum at 0 the product of a step with itself becomes 0 before that with the gradient's change does."""
    x = torch.full((2,), 1.7e-153, dtype=torch.float64, requires_grad=True)

    def closure() -> torch.Tensor:
        x.grad = None
        f = x.square().sum() * (1 + 0.1 * torch.log(x.detach().norm() / 1e-140) ** 2)
        f.backward()  # type: ignore[no-untyped-call]
        return f

    optimizer = batchopt.SSBroyden([x], max_iter=400, tolerance_grad=0, tolerance_change=0)
    first = float(torch.as_tensor(optimizer.step(closure)).detach())
    assert optimizer.result is not None and optimizer.result.f < first
