"""Conjugate gradients against linear ones."""

from __future__ import annotations

import pytest
import torch

import batchopt
from tests.optim import reference
from tests.optim.kinds import Problem, start


@pytest.mark.parametrize("beta", ["fletcher-reeves", "polak-ribiere", "hestenes-stiefel", "hager-zhang"])
def test_on_a_quadratic_with_exact_searches_the_iterates_are_those_of_linear_cg(
    beta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchopt.CG, "flat", 1e-12)
    matrix = torch.diag(torch.linspace(1.0, 9.0, 8, dtype=torch.float64)) + 0.1
    right = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
    problem = Problem(
        batchopt.CG, lambda x: 0.5 * x @ (matrix @ x) - right @ x, start(8), beta=beta, max_iter=6, tolerance_change=0.0
    )
    points: list[torch.Tensor] = []
    problem.optimizer.callback = lambda iteration: points.append(problem.x)
    problem.step()
    for i, point in enumerate(points):
        expected = reference.conjugate_gradients(matrix, right, start(8), i + 1)
        torch.testing.assert_close(point, expected, rtol=1e-5, atol=1e-6)
    assert len(points) == 6
