"""Residuals over NumPy vectors: for SciPy's least squares, with bounds and robust losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn

from tests.backends.least_squares_contract import DATA, flow, reference, terms
from tests.building import loaded
from tests.workloads import Mlp


@pytest.mark.parametrize("parallelize", [1, 2])
def test_half_the_sum_of_the_squares_is_f_and_the_jacobian_is_its_own(parallelize: int) -> None:
    module = flow()
    with loaded(module, None, DATA, terms=terms(), parallelize=parallelize, chunk_size=7) as opt:
        f = opt.objective()
        squares, x = f.least_squares(), f.x0
        r, w, j = reference(module)
        roots = (2 * w).sqrt()
        np.testing.assert_allclose(squares.fun(x), (r * roots).numpy(), rtol=1e-12, atol=1e-14)
        assert squares.fun(x) @ squares.fun(x) / 2 == pytest.approx(f(x), rel=1e-13)
        expected = (j * roots[:, None]).numpy()
        np.testing.assert_allclose(squares.jac(x), expected, rtol=1e-12, atol=1e-13)
        operator = squares.operator(x)
        v, u = np.linspace(-1, 1, len(x)), np.linspace(-2, 1, len(r))
        f.assign(x * 0)  # an operator stays where it was made
        np.testing.assert_allclose(operator @ v, expected @ v, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(operator.T @ u, expected.T @ u, rtol=1e-11, atol=1e-12)
        assert not f.x0.any()


def test_weights_are_those_of_the_loaded_batch() -> None:
    with loaded(flow(), None, DATA, terms=terms()) as opt:
        f = opt.objective()
        opt.weights = {"pde": 50.0, "data": 0.0}  # for the batch that is loaded next
        values = f.least_squares().fun(f.x0)
        assert values @ values / 2 == pytest.approx(f(f.x0), rel=1e-13)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_what_is_frozen_between_two_calls_has_no_columns(parallelize: int) -> None:
    module = flow()
    with loaded(module, None, DATA, terms=terms(), parallelize=parallelize) as opt:
        assert opt.normal().matrix.diagonal().gt(0).all()
        module.speed.requires_grad_(False)
        opt.load(DATA)
        opt.evaluate()
        found = opt.normal()
        torch.testing.assert_close(found.vector, opt.grad_parameters / 2, rtol=1e-10, atol=1e-12)
        assert int((found.matrix.diagonal() == 0).sum()) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("products", [False, True])
def test_scipy_takes_it_with_bounds_and_robust_losses(products: bool) -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 60).double()[:, None]
    y = torch.sin(2 * x)
    y[7] = 40.0
    with loaded(Mlp(1, 4, 1).double(), nn.MSELoss(), x, y) as opt:
        f = opt.objective()
        squares = f.least_squares()
        jac, more = (squares.operator, {"tr_solver": "lsmr"}) if products else (squares.jac, {})
        found = optimize.least_squares(
            squares.fun, f.x0, jac=jac, bounds=(-4, 4), loss="soft_l1", f_scale=0.01, max_nfev=60, **more
        )
        f.assign(found.x)
        assert np.abs(found.x).max() <= 4
        rest = torch.arange(60) != 7
        assert (opt.predict(x) - y)[rest].abs().max() < 0.3


def test_where_f_is_no_sum_of_squares() -> None:
    with loaded(Mlp(), nn.L1Loss(), torch.randn(4, 6), torch.randn(4, 4)) as opt:
        f = opt.objective()
        with pytest.raises(ValueError, match="f is not known to be a sum of squares"):
            f.least_squares().fun(f.x0)
