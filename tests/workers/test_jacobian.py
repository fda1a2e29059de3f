"""The rows of a Jacobian, and products with it, are those of one backward a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchopt_workers.map.squares import MeanSquare
from batchopt_workers.tasks.jacobian import Jacobian
from tests.backends.least_squares_contract import jacobian as rows
from tests.backends.least_squares_contract import trained
from tests.workloads import Mlp

torch.manual_seed(0)
X = torch.randn(23, 6, dtype=torch.float64)
Y = torch.randn(23, 4, dtype=torch.float64)


def difference(module: Any, inputs: Any, targets: Any) -> torch.Tensor:
    found: torch.Tensor = module(inputs) - targets
    return found


def slopes(module: Any, inputs: torch.Tensor, targets: Any) -> torch.Tensor:
    """torch.func cannot differentiate this one."""
    inputs = inputs.detach().requires_grad_()
    (found,) = torch.autograd.grad(module(inputs).square().sum(), inputs, create_graph=True)
    return found


def branching(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Looks at the numbers of each sample, which torch.func cannot."""
    outputs = module(inputs)
    return torch.stack([row * 2 if float(row.detach().sum()) > 0 else row * 3 for row in outputs])


def by_method(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Asks the module for something else than its output."""
    found: torch.Tensor = module.scores(inputs) - targets
    return found


class Scoring(Mlp):
    """Its method looks at the numbers, too."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self(row) if float(row.sum()) > 0 else self(row).square() for row in x])


def by_layer(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Calls parts of the module, and uses a parameter by itself."""
    inputs = inputs.detach().requires_grad_()
    u = module.second(torch.tanh(module.first(inputs)))
    (slope,) = torch.autograd.grad(u.sum(), inputs, create_graph=True)
    found: torch.Tensor = slope[:, :2] * module.factor + targets[:, :2] * module.shift
    return found


class WithFactors(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor(0.3))


class Tied(nn.Module):
    """Two layers of one weight, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.last = nn.Linear(6, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return found


def by_rows(residual: Any, module: nn.Module | None = None) -> tuple[Any, Jacobian]:
    """A module, and what has the rows of its residual."""
    module = Mlp().double() if module is None else module
    return module, Jacobian(module, trained(module), MeanSquare(residual))


def same(found: torch.Tensor, module: nn.Module, residuals: torch.Tensor) -> None:
    """The rows are those of one backward each."""
    torch.testing.assert_close(found, rows(module, residuals), rtol=1e-12, atol=1e-13)


CASES: dict[str, tuple[type[nn.Module], Any, str]] = {
    "by torch.func": (Mlp, difference, "_mapped"),
    "tied and not trained": (Tied, difference, "_mapped"),
    "with parameters for each sample": (Mlp, slopes, "_apart"),
    "parts of the module": (WithFactors, by_layer, "_apart"),
    "with branches": (Mlp, branching, "_apart"),
    "row by row": (Scoring, by_method, ""),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_rows_and_products(case: str, dtype: torch.dtype) -> None:
    make, residual, way = CASES[case]
    torch.manual_seed(1)
    module, jacobian = by_rows(residual, make().to(dtype))
    inputs, targets = X.to(dtype), Y.to(dtype)
    blocks = [*jacobian.blocks(inputs, targets, 23)]
    assert [method.__name__ for method in jacobian._ways][:1] == ([way] if way else [])
    assert (jacobian.one_by_one > 0) == (not way)
    expected = residual(module, inputs, targets)
    j = rows(module, expected)
    rtol, atol = (1e-12, 1e-13) if dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(
        torch.cat([b.residuals for b in blocks]), expected.detach().flatten(), rtol=rtol, atol=atol
    )
    torch.testing.assert_close(torch.cat([b.rows for b in blocks]), j, rtol=rtol, atol=atol)
    v = torch.linspace(-1.0, 2.0, j.shape[1]).to(dtype)
    u = torch.linspace(-1.0, 1.0, j.shape[0]).to(dtype).view_as(expected)
    values = jacobian.residuals(inputs, targets, 23)
    torch.testing.assert_close(jacobian.times(values, v).flatten(), j @ v, rtol=rtol, atol=atol)
    product = jacobian.transposed_times(values, u, keep=True)
    torch.testing.assert_close(product, (j.T @ u.flatten()).double(), rtol=rtol, atol=atol)
    assert all(parameter.grad is None for parameter in module.parameters())


def complex_numbers(module: Any, inputs: Any, targets: Any) -> torch.Tensor:
    return torch.complex(module(inputs), targets)


def raises(module: Any, inputs: Any, targets: Any) -> torch.Tensor:
    raise ArithmeticError("mine")


DEPENDS = "depend on the other samples of its chunk, or on random numbers"


@pytest.mark.parametrize(
    "residual, error, words",
    [
        (lambda module, x, y: module(x).sum(), ValueError, r"`residual` returned shape \(\) for 23 samples"),
        (lambda module, x, y: [module(x)], TypeError, "`residual` must return a tensor"),
        (complex_numbers, TypeError, "got torch.complex128: return torch.view_as_real of it"),
        (lambda module, x, y: module(x) - module(x).mean(), ValueError, DEPENDS),
        (lambda module, x, y: nn.functional.dropout(module(x)), ValueError, DEPENDS),
        (raises, ArithmeticError, "mine"),
    ],
)
def test_what_is_no_residual(residual: Any, error: type[Exception], words: str) -> None:
    _, jacobian = by_rows(residual)
    with pytest.raises(error, match=words):
        [*jacobian.blocks(X, Y, 23)]


def test_bad_samples_do_not_decide_the_way() -> None:
    module, jacobian = by_rows(difference)
    (block,) = jacobian.blocks(X[:5] * torch.nan, Y[:5], 5)
    assert block.rows.isnan().any()

    def picky(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if inputs.shape[-1] != 6:
            raise ArithmeticError("mine")
        return difference(module, inputs, targets)

    _, other = by_rows(picky, module)
    with pytest.raises(ArithmeticError, match="mine"):
        [*other.blocks(X[:, :5], Y, 23)]
    for each in (jacobian, other):
        found = torch.cat([block.rows for block in each.blocks(X, Y, 23)])
        assert each.one_by_one == 0
        same(found, module, difference(module, X, Y))
