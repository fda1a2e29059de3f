"""The contract of every backend for least squares: residuals, their Jacobian's products, and the normal equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term
from tests.workloads import Mlp

Make = Callable[..., BatchOptimizer]
X = torch.linspace(-2.0, 2.0, 37 * 2, dtype=torch.float64).reshape(37, 2).sin()
Y = torch.linspace(-1.0, 3.0, 37, dtype=torch.float64).reshape(37, 1).cos()
WEIGHTS = {"pde": 2.0, "data": 0.5}


class Flow(nn.Module):
    """A small network, and two coefficients that residuals use by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp(2, 5, 1)
        self.speed = nn.Parameter(torch.tensor(1.3))
        self.viscosity = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u: torch.Tensor = self.net(x)
        return u


def equation(module: Any, points: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
    """A differential equation, by torch.autograd.grad."""
    points = points.detach().requires_grad_()
    u = module(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
    residual: torch.Tensor = slope[:, 1:] + module.speed * u * slope[:, :1] - module.viscosity * second[:, :1]
    return residual


def misfit(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Two numbers a sample."""
    u = module(inputs)
    return torch.cat([u - targets, u.square() * targets], dim=1)


def terms() -> dict[str, Term]:
    return {
        "pde": Term(residual=equation, weight=WEIGHTS["pde"]),
        "data": Term(residual=misfit, weight=WEIGHTS["data"]),
    }


DATA: dict[str, Any] = {"pde": X, "data": (X[:20], Y[:20])}


def flow() -> Flow:
    torch.manual_seed(0)
    return Flow().double()


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def jacobian(module: nn.Module, residuals: torch.Tensor) -> torch.Tensor:
    """Row by row, by torch alone."""
    rows = []
    for residual in residuals.reshape(-1):
        found = torch.autograd.grad(residual, trained(module), retain_graph=True, allow_unused=True)
        pairs = zip(found, trained(module), strict=True)
        rows.append(torch.cat([torch.zeros(p.numel()).to(p) if g is None else g.flatten() for g, p in pairs]))
    return torch.stack(rows)


def reference(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All residuals, their weights in f, and the Jacobian."""
    found = [equation(module, X, None), misfit(module, X[:20], Y[:20])]
    weights = [
        torch.full((r.numel(),), w / r.numel(), dtype=r.dtype) for r, w in zip(found, WEIGHTS.values(), strict=True)
    ]
    residuals = torch.cat([r.detach().flatten() for r in found])
    return residuals, torch.cat(weights), torch.cat([jacobian(module, r) for r in found])


def alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To 1e-12 of the largest."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


class LeastSquaresContract:
    """What holds for any backend where f is a sum of squares."""

    backend: str
    parallelize: int
    processes = True

    @property
    def asked(self) -> int:
        """What is given as `parallelize` to have so many workers."""
        return self.parallelize

    @pytest.mark.rows
    @pytest.mark.parametrize("chunk_size", [None, 5])
    def test_the_normal_equations_and_products_are_those_of_one_jacobian(
        self, make: Make, chunk_size: int | None
    ) -> None:
        module = flow()
        opt = make(module, terms=terms(), optimizer=None, chunk_size=chunk_size)
        opt.load(DATA)
        f = opt.evaluate().item()
        gradient = opt.grad_parameters.clone()
        r, w, j = reference(module)
        found = opt.normal()
        assert found.loss == pytest.approx(f, rel=1e-13)
        assert f == pytest.approx(float(w @ r.square()), rel=1e-13)
        alike(found.vector, gradient / 2)
        alike(found.vector, j.T @ (w * r))
        alike(found.matrix, j.T @ (w[:, None] * j))
        assert torch.equal(found.matrix, found.matrix.T)
        v = torch.linspace(-1.0, 1.0, len(opt.parameters), dtype=torch.float64)
        alike(opt.gauss_newton(v), found.matrix @ v)
        block = torch.stack([v, v.sin(), v * 0], dim=1)
        alike(opt.gauss_newton(block), found.matrix @ block)
        values, along = opt.residuals(), opt.jvp(v)
        assert values["pde"].shape == (37, 1) and values["data"].shape == (20, 2)
        alike(torch.cat([values["pde"].flatten(), values["data"].flatten()]), r)
        alike(torch.cat([along["pde"].flatten(), along["data"].flatten()]), j @ v)
        alike(opt.vjp(values), j.T @ r)
        gram = opt.gram()
        alike(gram, j @ j.T)
        assert torch.equal(gram, gram.T)
        if chunk_size is not None:  # else shares follow the speeds
            assert opt.evaluate().item() == f and torch.equal(opt.grad_parameters, gradient)

    def test_the_mean_squared_error_knows_its_residuals(self, make: Make) -> None:
        module = Mlp(2, 5, 1).double()
        opt = make(module, nn.MSELoss(), optimizer=None, chunk_size=6)
        opt.load(X, Y)
        torch.testing.assert_close(opt.residuals(), module(X).detach() - Y, rtol=1e-13, atol=1e-14)
        others = opt.residuals(X[3:30], Y[3:30])
        torch.testing.assert_close(others, (module(X) - Y)[3:30].detach(), rtol=1e-13, atol=1e-14)
        j = jacobian(module, module(X) - Y)
        alike(opt.normal().matrix, j.T @ j / 37)
        alike(opt.vjp(torch.ones(37, 1, dtype=torch.float64)), j.sum(0))
