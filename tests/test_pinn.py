"""The published problems are what they say: solutions solve them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.pinn_problems import (
    ALLEN_CAHN,
    BETA,
    BURGERS,
    CONVECTION,
    DIFFUSION,
    HELMHOLTZ,
    INVERSE,
    NU,
    PROBLEMS,
    Problem,
    allen_cahn_solution,
)


class Known(nn.Module):
    """A function in place of a network."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], **numbers: float) -> None:
        super().__init__()
        self.function = function
        for name, value in numbers.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=torch.float64)))

    def forward(self, at: Tensor) -> Tensor:
        return self.function(at[..., 0], at[..., 1])[..., None]


def residual(problem: Problem, name: str, module: nn.Module, count: int = 9) -> tuple[Tensor, Tensor]:
    """The points of a part, and its residual there."""
    part = problem.parts[name]
    entry = part.draw(count, 3)
    at, values = entry if isinstance(entry, tuple) else (entry, None)
    return at, part.residual(module, at, values).detach().reshape(count)


SOLVED = {
    CONVECTION.name: Known(lambda t, x: torch.sin(x - BETA * t)),
    HELMHOLTZ.name: Known(lambda x, y: torch.sin(math.pi * x) * torch.sin(4 * math.pi * y)),
}


@pytest.mark.parametrize("name", SOLVED)
def test_the_solution_leaves_nothing(name: str) -> None:
    problem, module = PROBLEMS[name], SOLVED[name]
    for part in problem.parts:
        _, left = residual(problem, part, module)
        torch.testing.assert_close(left, torch.zeros(9, dtype=torch.float64), atol=1e-9, rtol=0)
    assert problem.error(module) < 1e-14  # type: ignore[arg-type]


def test_the_residuals_are_those_of_the_equations() -> None:
    """On u = t x^2, whose derivatives are x^2, 2 t x and 2 t."""
    known = Known(lambda t, x: t * x**2, a=2.0, log_b=math.log(3.0))
    at, left = residual(BURGERS, "residual", known)
    t, x = at.T
    torch.testing.assert_close(left, x**2 + 2 * t**2 * x**3 - 2 * NU * t)
    at, left = residual(INVERSE, "residual", known)
    t, x = at.T
    torch.testing.assert_close(left, x**2 + 2 * 2 * t**2 * x**3 - 3 * 2 * t)
    at, left = residual(ALLEN_CAHN, "residual", known)
    t, x = at.T
    u = t * x**2
    torch.testing.assert_close(left, x**2 - 2 * DIFFUSION * t - 5 * u + 5 * u**3)


def test_the_error_of_the_inverse_problem_is_that_of_the_worse_coefficient() -> None:
    found = Known(lambda t, _: t, a=1.01, log_b=math.log(NU) + math.log(0.9))
    assert INVERSE.error(found) == pytest.approx(0.1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_allen_cahn_begins_as_given_and_goes_on_as_without_diffusion() -> None:
    """Where the solution is smooth there is not much of it: u' = 5 u - 5 u^3 has a solution in closed form."""
    t, x, u = allen_cahn_solution()
    np.testing.assert_allclose(u[0], x[0] ** 2 * np.cos(np.pi * x[0]), atol=1e-12)
    np.testing.assert_allclose(u, u[:, ::-1], atol=1e-9)
    column = np.abs(x[0] - 0.3125).argmin()
    first = u[0, column]
    times = t[:30, column]
    expected = first * np.exp(5 * times) / np.sqrt(1 + first**2 * (np.exp(10 * times) - 1))
    np.testing.assert_allclose(u[:30, column], expected, rtol=0.05)
