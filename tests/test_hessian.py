"""Products of the Hessian with vectors are those of plain torch, for any number of workers, and disturb nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, extending
from tests.building import loaded, on
from tests.workloads import Workload, burgers, mlp

WAYS = pytest.mark.parametrize(
    "options",
    [{"parallelize": 1}, {"chunk_size": 5}, {"parallelize": 2, "chunk_size": 5}],
    ids=str,
)


def direction(module: nn.Module, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = sum(parameter.numel() for parameter in module.parameters())
    return torch.randn(size, dtype=torch.float64, generator=generator)


def product(work: Workload, v: torch.Tensor) -> torch.Tensor:
    """By plain torch."""
    output, parameters = work.module(work.inputs), [*work.module.parameters()]
    loss = work.criterion(output) if work.targets is None else work.criterion(output, work.targets)
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    along = torch.cat([slope.flatten() for slope in slopes]) @ v
    return torch.cat([part.flatten() for part in torch.autograd.grad(along, parameters)])


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert ((found - right).norm() / right.norm()).item() <= 1e-10


def wide() -> Workload:
    """Larger than what is collected during the backward."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 8000), nn.Tanh(), nn.Linear(8000, 1)).double()
    return Workload(module, nn.MSELoss(), torch.randn(12, 40).double(), torch.randn(12, 1).double())


@pytest.mark.rows
@pytest.mark.parametrize(
    "case, options",
    [
        (wide, {"parallelize": 2, "chunk_size": 3}),
        (burgers, {"devices": ["cpu:0", "cpu:0"]}),
        (burgers, {"chunk_size": 4}),
    ],
)
def test_products_of_a_large_model_and_of_one_that_differentiates_itself_on_devices_too(
    case: Callable[[], Workload], options: dict[str, Any]
) -> None:
    """Those of others are in `test_forms.py` and `test_model.py`."""
    work = case()
    v = direction(work.module)
    with on(work, **options) as opt:
        for count, scale in enumerate((1.0, 2.0), 1):
            opt.parameters.mul_(scale)
            with opt.timeline() as timeline:
                close(opt.hvp(scale * v), product(work, scale * v))
            assert timeline.seconds("product") > 0 and "product" in str(timeline)
            assert (extending.product_counter(opt), opt.eval_counter) == (count, 0)


def test_a_product_sees_the_draws_and_leaves_the_buffers_of_its_step() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1)).double()
    x, y = torch.randn(24, 3).double(), torch.randn(24, 1).double()
    v = direction(module)
    h = 1e-5
    with (
        pytest.warns(UserWarning, match="BatchNorm1d"),
        BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=8) as opt,
    ):
        opt.load(x, y)
        statistics = [buffer.clone() for buffer in module.buffers()]
        product = opt.hvp(v)
        assert all(map(torch.equal, module.buffers(), statistics))
        kept, gradients = opt.parameters.clone(), []
        for sign in (1, -1):
            opt.parameters.copy_(kept + sign * h * v)
            opt.evaluate()
            gradients.append(opt.grad_parameters.clone())
        opt.parameters.copy_(kept)
    slope = (gradients[0] - gradients[1]) / (2 * h)
    assert ((product - slope).norm() / slope.norm()).item() < 1e-6


class Partly(nn.Module):
    """Linear in `linear`, a square of `square`; nothing depends on `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.square = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x @ self.linear).mean() + (x @ self.square).square().mean()
        return loss


@WAYS
def test_what_f_is_linear_in_or_does_not_depend_on_is_zero(options: dict[str, Any]) -> None:
    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with loaded(Partly(), None, x, **options) as opt:
        product = opt.hvp(torch.ones(7))
        assert product[:5].tolist() == [0.0] * 5
        close(product[5:], 2 * x.T @ x @ torch.ones(2, dtype=torch.float64) / 12)
    with loaded(nn.Linear(2, 1), None, torch.ones(12, 2), loss_fn=lambda m, x, y: m(x).mean(), **options) as opt:
        assert opt.hvp(torch.ones(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "v",
    [
        torch.tensor([1.0] * 50 + [math.nan] * 53),
        torch.full((103,), math.inf),
        torch.full((103,), 1e300, dtype=torch.float64),
    ],
    ids=["NaN", "infinity", "too much for X"],
)
def test_the_product_with_what_is_not_finite_is_nan(v: torch.Tensor) -> None:
    """Solvers try such vectors, and recover."""
    with on(mlp(torch.float32)) as opt:
        product = opt.hvp(v)
        assert product.isnan().all() and product.dtype == torch.float32 and extending.product_counter(opt) == 0
        flat = opt.objective()
        assert np.isnan(flat.hvp(flat.x0, v.double().numpy())).all()
        assert torch.isfinite(opt.hvp(torch.ones(103))).all()
