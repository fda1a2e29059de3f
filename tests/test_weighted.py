"""Weights of samples and robust losses: as plain torch and SciPy compute them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from torch import nn

from batchopt import BatchOptimizer, Term, Weighted
from tests.building import loaded
from tests.workloads import difference

ROBUST_LOSSES = pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
N = 40
X = torch.linspace(-2.0, 2.0, N * 3, dtype=torch.float64).reshape(N, 3).sin()
Y = torch.linspace(-1.0, 3.0, N * 2, dtype=torch.float64).reshape(N, 2).cos()
Y[7] += 30.0  # an outlier
W = torch.linspace(0.0, 5.0, N, dtype=torch.float64).cos().square()
W[3:9] = 0.0


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def close(found: tuple[float, torch.Tensor], loss: torch.Tensor, module: nn.Module) -> None:
    """f and df/dX are the loss and its gradient."""
    expected = torch.autograd.grad(loss, [*module.parameters()])
    assert found[0] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(found[1], torch.cat([g.reshape(-1) for g in expected]), rtol=1e-10, atol=1e-14)


# ---- weights of samples


def test_weights_of_any_size() -> None:
    module = network().float()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size=10) as opt:
        found = []
        for unit in (1.0, 1e-60, 1e60):
            opt.load(Weighted(X.float(), unit * W), Y.float())
            found.append(opt.evaluate().item())
    assert found == pytest.approx([found[0]] * 3, rel=1e-6) and math.isfinite(found[0])


@pytest.mark.filterwarnings("ignore:.*rows of the Jacobian took a backward each")
@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 0.5]])
@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_samples_of_different_numbers_of_residuals(weights: list[float] | None, loss: str) -> None:
    inputs, targets = [X[:1], X[1:4], X[4:6]], [Y[:1], Y[1:4], Y[4:6]]
    terms = {"one": Term(residual=difference, loss=loss, scale=0.3)}
    with loaded(
        network(), None, {"one": (inputs if weights is None else Weighted(inputs, weights), targets)}, terms=terms
    ) as opt:
        f, gradient = opt.evaluate().item(), opt.grad_parameters.clone()
        squares, x = opt.objective().least_squares(), opt.objective().x0
        fun, jac = squares.fun(x), squares.jac(x)
        assert opt.normal().loss == pytest.approx(f, rel=1e-12)
    assert 0.5 * float(fun @ fun) == pytest.approx(f, rel=1e-12)
    np.testing.assert_allclose(jac.T @ fun, gradient.numpy(), rtol=1e-9, atol=1e-12)


# ---- robust losses


def plain(loss: str, z: torch.Tensor) -> torch.Tensor:
    """rho(z), as SciPy's page has it."""
    match loss:
        case "soft_l1":
            return 2 * ((1 + z).sqrt() - 1)
        case "huber":
            return torch.where(z <= 1, z, 2 * z.sqrt() - 1)
        case "cauchy":
            return (1 + z).log()
        case _:
            return z.atan()


@pytest.mark.slow
@pytest.mark.rows
@ROBUST_LOSSES
@pytest.mark.parametrize("weights", [None, W])
def test_f_gradient_and_normal_equations(loss: str, weights: torch.Tensor | None) -> None:
    module, reference, scale = network(), network(), 0.4
    terms = {"one": Term(residual=difference, loss=loss, scale=scale, weight=3.0)}
    with loaded(
        module,
        None,
        {"one": (X if weights is None else Weighted(X, weights), Y)},
        terms=terms,
        parallelize=2,
        chunk_size=11,
    ) as opt:
        found = opt.evaluate().item(), opt.grad_parameters.clone()
        normal = opt.normal()
        v = torch.linspace(-1.0, 1.0, len(opt.parameters), dtype=torch.float64)
        product = opt.gauss_newton(v)
        squares, x = opt.objective().least_squares(), opt.objective().x0
        fun, jac, operator = squares.fun(x), squares.jac(x), squares.operator(x)
        by_products = operator.rmatvec(fun), operator.matvec(v.numpy())
    counted = torch.ones(N, dtype=torch.float64) if weights is None else weights
    r = reference(X) - Y
    close(found, 3 * scale**2 * (counted @ plain(loss, (r / scale) ** 2).mean(1)) / counted.sum(), reference)
    assert normal.loss == pytest.approx(found[0], rel=1e-12)
    torch.testing.assert_close(2 * normal.vector, found[1])
    torch.testing.assert_close(normal.matrix @ v, product)
    # the matrix that SciPy makes of residuals and Jacobian: J scaled with the root of rho' + 2 z rho'', at least eps
    r = reference(X) - Y
    z = ((r / scale) ** 2).detach().requires_grad_()
    (first,) = torch.autograd.grad(plain(loss, z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z) if first.requires_grad else (torch.zeros_like(z),)
    curved = (first + 2 * z * second).detach().clamp(min=torch.finfo(torch.float64).eps)
    weight = 3 * counted[:, None] * curved / (2 * counted.sum())
    rows = torch.stack(
        [
            torch.cat([g.reshape(-1) for g in torch.autograd.grad(one, [*reference.parameters()], retain_graph=True)])
            for one in r.reshape(-1)
        ]
    )
    torch.testing.assert_close(normal.matrix, rows.T @ (weight.reshape(-1, 1) * rows), rtol=1e-6, atol=1e-10)
    # half the sum of SciPy's squares is f, and its gradient is f's
    assert 0.5 * float(fun @ fun) == pytest.approx(found[0], rel=1e-12)
    assert np.array_equal(np.sign(fun), (r.detach().sign() * counted.sign()[:, None]).flatten().numpy())
    np.testing.assert_allclose(jac.T @ fun, found[1].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(by_products[0], found[1].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(by_products[1], jac @ v.numpy(), rtol=1e-9, atol=1e-12)


class Decay(nn.Module):
    """Three parameters, as in SciPy's tutorial on robust regression."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(1.0, dtype=torch.float64)) for _ in "abc")

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.a + self.b * torch.exp(self.c * t)


@pytest.mark.rows
@ROBUST_LOSSES
def test_the_minimum_is_scipys(loss: str) -> None:
    random = np.random.default_rng(1)
    t = np.linspace(0.0, 10.0, 60)
    y = 0.5 + 2.0 * np.exp(-t) + 0.05 * random.standard_normal(60)
    y[random.choice(60, 6, replace=False)] += 3.0
    scale = 0.1
    start = np.array([0.6, 1.8, -0.9])  # from further away arctan has another minimum
    options: Any = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 2000}
    theirs = least_squares(lambda p: p[0] + p[1] * np.exp(p[2] * t) - y, start, loss=loss, f_scale=scale, **options)
    module = Decay()
    for parameter, value in zip(module.parameters(), start, strict=True):
        parameter.data.fill_(value)
    inputs, targets = torch.from_numpy(t), torch.from_numpy(y)
    terms = {"data": Term(residual=difference, loss=loss, scale=scale)}
    with BatchOptimizer(module, terms=terms, optimizer="lm", parallelize=1) as opt:
        batch = {"data": (inputs, targets)}
        opt.step(batch)
        assert opt.output == pytest.approx(2 * theirs.cost / 60, rel=1e-8)
        np.testing.assert_allclose(opt.parameters.numpy(), theirs.x, rtol=2e-4)
        opt.load(batch)
        squares = opt.objective().least_squares()
        again = least_squares(squares.fun, start, jac=squares.jac, **options)
        assert again.cost == pytest.approx(opt.output, rel=1e-8)


@ROBUST_LOSSES
def test_at_any_magnitude(loss: str) -> None:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    found = []
    term = Term(residual=lambda module, x, _: module(x), loss=loss)
    with BatchOptimizer(module, terms={"a": term}, optimizer=None) as opt:
        for u in (0.0, 1e-9, 0.5, 3.0, 1e8, 1e150):
            opt.load({"a": torch.tensor([[u]], dtype=torch.float64)})
            f, normal = opt.evaluate().item(), opt.normal()
            assert math.isfinite(f) and bool(opt.grad_parameters.isfinite().all() & normal.matrix.isfinite().all())
            torch.testing.assert_close(2 * normal.vector, opt.grad_parameters, rtol=1e-9, atol=0.0)
            found.append(f)
    assert found == sorted(found)
