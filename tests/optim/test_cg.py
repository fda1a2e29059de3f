"""Conjugate gradients against linear ones."""

from __future__ import annotations

import pytest
import torch

import batchopt
from tests.optim import reference
from tests.optim.kinds import Problem, start


def test_on_a_quadratic_with_exact_searches_the_iterates_are_those_of_linear_cg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batchopt.CG, "flat", 1e-12)
    matrix = torch.diag(torch.linspace(1.0, 9.0, 8, dtype=torch.float64)) + 0.1
    right = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
    problem = Problem(
        batchopt.CG, lambda x: 0.5 * x @ (matrix @ x) - right @ x, start(8), max_iter=6, tolerance_change=0.0
    )
    points: list[torch.Tensor] = []
    problem.optimizer.callback = lambda iteration: points.append(problem.x)
    problem.step()
    for i, point in enumerate(points):
        expected = reference.conjugate_gradients(matrix, right, start(8), i + 1)
        torch.testing.assert_close(point, expected, rtol=1e-5, atol=1e-6)
    assert len(points) == 6


def beta(g: torch.Tensor, h: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The published formula, of the gradients before and after a step along `d`."""
    y = h - g
    return torch.maximum((y - 2 * d * (y @ y) / (d @ y)) @ h / (d @ y), 0.4 * (d @ g) / (d @ d))


def test_directions_are_those_of_the_formula_also_where_the_search_is_inexact() -> None:
    weights = torch.linspace(1.0, 20.0, 6, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (weights * x.square() / 2 + x**4 / 4 + x.roll(1) * x / 3).sum()

    problem = Problem(batchopt.CG, f, start(6), max_iter=7, tolerance_change=0.0)
    points = [start(6)]
    problem.optimizer.callback = lambda iteration: points.append(problem.x.clone())
    problem.step()
    gradients = [torch.autograd.grad(f(at := x.clone().requires_grad_()), at)[0] for x in points]
    direction = -gradients[0]
    for i in range(7):
        step = points[i + 1] - points[i]
        assert torch.cosine_similarity(step, direction, dim=0) == pytest.approx(1.0, abs=1e-10)
        g, h = gradients[i : i + 2]
        factor = beta(g, h, direction)
        is_steep = factor * (direction @ h) < 0.99 * (h @ h)
        direction = -h + factor * is_steep * direction
