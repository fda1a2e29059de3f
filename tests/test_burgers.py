"""The physics-informed example: its exact solution is one, and its residual that of the equation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import pinn_problems
from scripts import burgers


@pytest.mark.slow
def test_the_solution_is_that_of_a_finer_quadrature() -> None:
    t, x = np.meshgrid([0.02, 0.3, 0.7, 1.0], [-0.97, -0.4, -0.01, 0.003, 0.2, 0.9], indexing="ij")
    eta = np.linspace(-2, 2, 400_001)
    y = x[..., None] - eta
    exponent = -np.cos(np.pi * y) / (2 * np.pi * burgers.NU) - eta**2 / (4 * burgers.NU * t[..., None])
    kernel = np.exp(exponent - exponent.max(-1, keepdims=True))
    expected = -(np.sin(np.pi * y) * kernel).sum(-1) / kernel.sum(-1)
    np.testing.assert_allclose(burgers.exact(t, x), expected, atol=1e-9)
    np.testing.assert_allclose(pinn_problems.burgers(t, x), expected, atol=1e-9)


def test_the_residual_is_that_of_the_equation() -> None:
    """On u = t x^2: u_t + u u_x - nu u_xx is x^2 + 2 t^2 x^3 - 2 nu t."""

    class Known(torch.nn.Module):
        def forward(self, at: torch.Tensor) -> torch.Tensor:
            return (at[:, 0] * at[:, 1] ** 2)[:, None]

    at = torch.rand(7, 2, dtype=torch.float64)
    t, x = at[:, 0], at[:, 1]
    expected = (x**2 + 2 * t**2 * x**3 - 2 * burgers.NU * t).square().mean()
    torch.testing.assert_close(burgers.residual(Known(), at, None), expected)
