"""The function of a batch as plain mathematics, and solvers of other libraries on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

from batchopt import BatchOptimizer, NonFiniteError, WorkerError
from tests.backends.least_squares_contract import DATA, flow, reference, terms
from tests.building import loaded, on
from tests.workloads import Mlp, Workload, logistic, mlp


def ridge() -> Workload:
    """Logistic regression with a unique minimum."""
    work = logistic()
    targets = work.targets.clamp(0)

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = work.module

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            penalty = sum((p.square().sum() for p in self.scores.parameters()), torch.zeros(()))
            return nn.functional.cross_entropy(self.scores(x), y) + 0.01 * penalty

    return Workload(Penalised(), None, work.inputs, targets)  # type: ignore[arg-type]


def test_value_gradient_and_curvature_are_those_of_the_module() -> None:
    work = mlp()
    with on(work, parallelize=2) as opt:
        objective = opt.objective()
        x = objective.x0 + 0.1
        v = np.sin(np.arange(len(x)))
        value, gradient = objective.value_and_grad(x)
        assert gradient.dtype == "float64" and gradient.shape == x.shape
        product = objective.hvp(x, v)
        objective.assign(x)
        assert torch.equal(opt.parameters, torch.from_numpy(x))
        right, slope = work.reference()
        assert value == pytest.approx(right, rel=1e-12)
        np.testing.assert_allclose(gradient, slope.numpy(), rtol=1e-10, atol=1e-14)
        h = 1e-6
        ahead, behind = (objective.gradient(x + sign * h * v) for sign in (1, -1))
        np.testing.assert_allclose(product, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-8)


def test_calls_leave_parameters_as_they_were() -> None:
    work = mlp()
    with on(work, parallelize=2) as opt:
        objective = opt.objective()
        x = objective.x0
        before = opt.parameters.clone()
        for call in (objective, objective.gradient, objective.value_and_grad, lambda x: objective.hvp(x, x)):
            call(x + 1.0)
            assert torch.equal(opt.parameters, before)
        x += 1.0
        assert torch.equal(opt.parameters, before)
        objective.value_and_grad(x)[1].fill(7.0)
        objective.gradient(x).fill(7.0)
        assert not (objective.gradient(x) == 7.0).any()


def picky(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (output - targets).square().mean()
    if loss > 1e6:
        raise ValueError("too far")
    return loss


def test_calls_that_raise_leave_parameters_as_they_were() -> None:
    work = mlp()
    with on(Workload(work.module, picky, work.inputs, work.targets), parallelize=2) as opt:
        objective = opt.objective()
        x, before = objective.x0, opt.parameters.clone()
        value = objective(x)
        for call in (objective, objective.gradient, lambda x: objective.hvp(x, x)):
            with pytest.raises(WorkerError, match="too far"):
                call(x + 1e4)
            assert torch.equal(opt.parameters, before)
        assert objective(x) == pytest.approx(value, rel=1e-12)


def test_the_last_point_is_remembered_until_another_batch_is_loaded() -> None:
    work = mlp()
    with on(work) as opt:
        objective = opt.objective()
        x = objective.x0
        value, gradient = objective(x), objective.gradient(x)
        assert objective.value_and_grad(x)[0] == value
        assert opt.eval_counter == 1
        objective(x + 1.0)
        assert np.array_equal(objective.gradient(x), gradient)
        assert opt.eval_counter == 3
        opt.load(work.inputs, work.targets)
        assert objective(x) == pytest.approx(value)
        assert opt.eval_counter == 4
        opt.load(work.inputs[:10], work.targets[:10])
        assert objective(x) != pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_point_that_is_not_finite_is_answered_and_never_assigned(bad: float) -> None:
    with on(mlp(torch.float32)) as opt:
        objective = opt.objective()
        x = objective.x0
        x[5] = bad
        assert math.isnan(objective(x)) and np.isnan(objective.gradient(x)).all()
        assert np.isnan(objective.hvp(x, np.ones(103))).all() and opt.eval_counter == 0
        with pytest.raises(ValueError, match=r"`x\[5\]` is (inf|nan)"):
            objective.assign(x)


def root_of_weight(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """NaN where the first weight is negative."""
    loss: torch.Tensor = (module(x) - y).square().mean() + next(module.parameters())[0, 0].sqrt()
    return loss


@pytest.mark.rows
@pytest.mark.parametrize("on_nonfinite", ["raise", "return"])
def test_where_f_is_nan_it_is_an_answer(on_nonfinite: str) -> None:
    module = nn.Linear(3, 1).double()
    given: dict[str, Any] = {"loss_fn": root_of_weight, "optimizer": None, "on_nonfinite": on_nonfinite}
    with BatchOptimizer(module, parallelize=2, **given) as opt:
        opt.load(torch.randn(10, 3).double(), torch.randn(10, 1).double())
        objective = opt.objective()
        x = np.array([0.5, 0.1, 0.1, 0.1])
        before = objective(x)
        x[0] = -0.5
        value, gradient = objective.value_and_grad(x)
        assert math.isnan(value) and math.isnan(gradient[0]) and np.isfinite(gradient[1:]).all()
        assert np.isnan(objective.hvp(x, np.ones(4))).any()
        objective.assign(x)
        if on_nonfinite == "raise":  # which an evaluation is not
            with pytest.raises(NonFiniteError):
                opt.evaluate()
        x[0] = 0.5
        assert objective(x) == pytest.approx(before, rel=1e-12)


def test_what_can_be_a_point() -> None:
    with on(mlp(torch.float32)) as opt:
        objective = opt.objective()
        right = objective(np.ones(103))
        for x in ([1] * 103, torch.ones(103), np.ones(206, dtype=np.float32)[::2], np.ones(103, dtype=">f8")):
            assert objective(x) == right
        objective.assign(np.arange(103))
        assert opt.parameters.tolist() == list(range(103))


METHODS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "L-BFGS-B": lambda objective: {"options": {"gtol": 1e-9, "ftol": 0.0, "maxcor": 30}},
    "Newton-CG": lambda objective: {"hessp": objective.hvp, "options": {"xtol": 1e-10}},
}


@pytest.mark.rows
@pytest.mark.parametrize("method", ["L-BFGS-B with bounds", "Newton-CG"])
def test_scipy_finds_the_minimum(method: str) -> None:
    """It is unique: there the gradient is 0, but at a bound."""
    name, _, bounded = method.partition(" with ")
    bound = 0.2 if bounded else np.inf
    with on(ridge(), parallelize=2) as opt:
        objective = opt.objective()
        start, limits = np.clip(objective.x0, -bound, bound), {"bounds": scipy.optimize.Bounds(-bound, bound)}
        given = {**METHODS[name](objective), **(limits if bounded else {})}
        found = scipy.optimize.minimize(objective.value_and_grad, start, jac=True, method=name, **given)
        free = np.abs(found.x) < bound
        assert np.abs(objective.gradient(found.x)[free]).max() < 1e-6 and free.all() == (not bounded)
        assert not np.allclose(objective.x0, found.x)
        objective.assign(found.x)
        assert opt.evaluate().item() == pytest.approx(found.fun, rel=1e-12)


def test_a_torch_optimizer_of_another_library_finds_the_minimum() -> None:
    torchmin = pytest.importorskip("torchmin")
    work = ridge()
    with on(work, parallelize=2) as opt:
        minimizer = torchmin.Minimizer(list(work.module.parameters()), method="bfgs", tol=1e-8, max_iter=500)
        # it calls backward() on what the closure returns, which has no graph here: the gradients are there already
        minimizer.step(lambda: opt.evaluate().requires_grad_())
        opt.evaluate()
        assert opt.grad_parameters.abs().max() < 1e-4


# ---- residuals, for SciPy's least squares, with bounds and robust losses


@pytest.mark.slow
def test_half_the_sum_of_the_squares_is_f_and_the_jacobian_is_its_own() -> None:
    module = flow()
    with loaded(module, None, DATA, terms=terms(), parallelize=2, chunk_size=7) as opt:
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


@pytest.mark.slow
@pytest.mark.rows
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
        found = scipy.optimize.least_squares(
            squares.fun, f.x0, jac=jac, bounds=(-4, 4), loss="soft_l1", f_scale=0.01, max_nfev=60, **more
        )
        f.assign(found.x)
        assert np.abs(found.x).max() <= 4
        rest = torch.arange(60) != 7
        assert (opt.predict(x) - y)[rest].abs().max() < 0.3
