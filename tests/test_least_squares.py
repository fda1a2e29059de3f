"""Least squares where functions, data or modules are odd: exact, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, LevenbergMarquardt, WorkerError, extending
from tests.building import loaded
from tests.workloads import Mlp

X = torch.linspace(-2.0, 2.0, 60 * 3, dtype=torch.float64).reshape(60, 3).sin()
Y = torch.linspace(-1.0, 3.0, 60 * 2, dtype=torch.float64).reshape(60, 2).cos()


# ---- functions that can be differentiated once


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.cos(ctx.saved_tensors[0])


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(grad.detach().numpy() * np.cos(ctx.saved_tensors[0].detach().numpy()))


class Bent(Mlp):
    """A network with that function in it, and a way around it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(3, 4, 2)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        y: torch.Tensor = self.second(self.function(hidden)) + hidden[:, :2]
        return y


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:.*rows of the Jacobian took a backward each")
@pytest.mark.parametrize("function", [Once.apply, ByNumpy.apply])
def test_products_with_what_can_be_differentiated_once_are_refused(function: Any) -> None:
    torch.manual_seed(0)
    module = Bent(function).double()
    with loaded(module, nn.MSELoss(), X, Y, parallelize=2) as opt:
        v = torch.linspace(-1.0, 1.0, len(opt.parameters), dtype=torch.float64)
        lm = LevenbergMarquardt(module.parameters(), dense=0, max_iter=50)
        for product in (lambda: opt.jvp(v), lambda: opt.gauss_newton(v), lambda: lm.step(extending.closure(opt))):
            with pytest.raises(WorkerError, match=r"takes the derivative of a backward, and one of them has none"):
                product()
        if function.__self__ is Once:
            with pytest.raises(WorkerError):
                opt.hvp(v)
        gradient = opt.vjp(opt.residuals()) * 2 / Y.numel()
        opt.evaluate()
        torch.testing.assert_close(gradient, opt.grad_parameters)
        before = opt.evaluate()
        LevenbergMarquardt(module.parameters(), max_iter=50).step(extending.closure(opt))
        assert opt.evaluate() < before


def test_products_through_attention() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 5, 8), torch.randn(8, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with loaded(layer, nn.MSELoss(), x, y, parallelize=2) as opt:
        v = torch.linspace(-1.0, 1.0, len(opt.parameters))
        product = opt.normal().matrix @ v.double()
        torch.testing.assert_close(opt.gauss_newton(v).double(), product, rtol=1e-4, atol=1e-6)
        assert opt.jvp(v).isfinite().all() and opt.hvp(v).isfinite().all()


# ---- samples that are coupled


class Coupled(nn.Linear):
    """From a sample on, each depends on the others."""

    from_there = 17

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, coupled = super().forward(x).tensor_split([self.from_there])
        return torch.cat([y, coupled + coupled.mean()])


def test_samples_that_are_coupled_are_found_wherever_they_are() -> None:
    module = Coupled(3, 2).double()
    words = "the residuals of a sample depend on the other samples of its chunk"
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=30) as opt:
        for module.from_there in (17, 99, 99, 17):
            opt.load(X, Y)
            if module.from_there == 17:
                for asked in (opt.normal, opt.gram):
                    with pytest.raises(WorkerError, match=words):
                        asked()
            else:
                assert opt.normal().loss == pytest.approx(opt.evaluate().item())


def _mean_of_all(y: torch.Tensor) -> torch.Tensor:
    return y.mean()


def _neighbours(y: torch.Tensor) -> torch.Tensor:
    return y.detach().flip(0) if len(y) % 2 else y.view(-1, 2).flip(1).reshape(y.shape)


def _halves(y: torch.Tensor) -> torch.Tensor:
    return y.roll(len(y) // 2, 0)


@pytest.mark.rows
@pytest.mark.parametrize("couple", [_mean_of_all, _neighbours, _halves])
def test_samples_that_are_coupled_in_a_later_batch_are_found_where_they_are_evaluated_together(
    couple: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Residuals that differentiate the output need all samples at once: a block is then the whole chunk."""

    def residual(module: nn.Module, inputs: torch.Tensor, _: Any) -> torch.Tensor:
        x = inputs.detach().requires_grad_()
        y = module(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        slope = slope.sum(1, keepdim=True)
        return slope + couple(y) if float(inputs.abs().max()) > 5.0 else slope + y

    torch.manual_seed(0)
    x = torch.randn(24, 3).double().clamp(-2.0, 2.0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    far = torch.cat([x[:-1], torch.full((1, 3), 6.0).double()])
    options: dict[str, Any] = {"residual": residual, "parallelize": 2, "chunk_size": 12}
    with BatchOptimizer(module, optimizer=None, **options) as opt:
        for points, is_coupled in ((x, False), (x + 0.1, False), (torch.cat([far, far]), True), (x, False)):
            opt.load(points)
            if is_coupled:
                for asked in (opt.normal, opt.gram):
                    with pytest.raises(WorkerError, match="depend on the other samples of its chunk"):
                        asked()
            else:
                assert opt.normal().loss == pytest.approx(opt.evaluate().item())


# ---- lists of samples, sparse gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*rows of the Jacobian took a backward each")
def test_a_list_of_samples() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def found(inputs: Any, targets: Any) -> list[torch.Tensor]:
        with loaded(module, nn.MSELoss(), inputs, targets, parallelize=2) as opt:
            v = torch.linspace(-1.0, 1.0, len(opt.parameters), dtype=torch.float64)
            squares, x = opt.objective().least_squares(), opt.objective().x0
            by_numpy = [squares.fun(x), squares.jac(x), squares.operator(x).rmatvec(squares.fun(x))]
            own = [opt.residuals(), opt.jvp(v), opt.vjp(opt.residuals()), opt.gram(), opt.normal().matrix]
            return [*own, *map(torch.from_numpy, by_numpy)]

    for one, two in zip(found([*X], [*Y]), found(X, Y), strict=True):
        torch.testing.assert_close(one, two)


# ---- others


class Simulator(nn.Module):
    """Computed by NumPy, so that results have no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.exp(-self.rate.detach().numpy() * x.numpy()))


@pytest.mark.parametrize("name", ["normal", "gram", "jvp", "vjp", "gauss_newton"])
def test_residuals_without_a_graph_are_refused(name: str) -> None:
    """Their Jacobian would be 0."""
    with BatchOptimizer(Simulator(), residual=lambda module, x, _: module(x) - 1.0, optimizer=None) as opt:
        opt.load(X)
        ones = {"jvp": torch.ones(1).double(), "gauss_newton": torch.ones(1).double(), "vjp": opt.residuals()}
        with pytest.raises(WorkerError, match="do not depend on any trainable parameter"):
            getattr(opt, name)(*([ones[name]] if name in ones else []))
