"""The physics-informed example: its exact solution is one, and its residual that of the equation."""

from __future__ import annotations

import torch

from scripts import burgers


def test_the_residual_is_that_of_the_equation() -> None:
    """On u = t x^2: u_t + u u_x - nu u_xx is x^2 + 2 t^2 x^3 - 2 nu t."""

    class Known(torch.nn.Module):
        def forward(self, at: torch.Tensor) -> torch.Tensor:
            return (at[:, 0] * at[:, 1] ** 2)[:, None]

    at = torch.rand(7, 2, dtype=torch.float64)
    t, x = at[:, 0], at[:, 1]
    expected = (x**2 + 2 * t**2 * x**3 - 2 * burgers.NU * t).square().mean()
    torch.testing.assert_close(burgers.residual(Known(), at, None), expected)
