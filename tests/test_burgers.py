"""The physics-informed example: its exact solution is one, and a short run does what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "burgers.py"


@pytest.fixture(scope="module")
def burgers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("burgers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_solution_is_that_of_a_finer_quadrature(burgers: ModuleType) -> None:
    t, x = np.meshgrid([0.02, 0.3, 0.7, 1.0], [-0.97, -0.4, -0.01, 0.003, 0.2, 0.9], indexing="ij")
    eta = np.linspace(-2, 2, 400_001)
    y = x[..., None] - eta
    exponent = -np.cos(np.pi * y) / (2 * np.pi * burgers.NU) - eta**2 / (4 * burgers.NU * t[..., None])
    kernel = np.exp(exponent - exponent.max(-1, keepdims=True))
    expected = -(np.sin(np.pi * y) * kernel).sum(-1) / kernel.sum(-1)
    np.testing.assert_allclose(burgers.exact(t, x), expected, atol=1e-9)


def test_the_solution_keeps_the_initial_and_boundary_values(burgers: ModuleType) -> None:
    x, t = np.linspace(-1, 1, 41), np.linspace(0, 1, 11)
    np.testing.assert_allclose(burgers.exact(np.zeros(41), x), -np.sin(np.pi * x), atol=1e-12)
    for side in (-1.0, 1.0):
        np.testing.assert_allclose(burgers.exact(t, np.full(11, side)), 0, atol=1e-9)


def test_the_residual_is_that_of_the_equation(burgers: ModuleType) -> None:
    """On u = t x^2: u_t + u u_x - nu u_xx is x^2 + 2 t^2 x^3 - 2 nu t."""

    class Known(torch.nn.Module):
        def forward(self, at: torch.Tensor) -> torch.Tensor:
            return (at[:, 0] * at[:, 1] ** 2)[:, None]

    at = torch.rand(7, 2, dtype=torch.float64)
    t, x = at[:, 0], at[:, 1]
    expected = (x**2 + 2 * t**2 * x**3 - 2 * burgers.NU * t).square().mean()
    torch.testing.assert_close(burgers.residual(Known(), at, None), expected)
