"""The rows of a Jacobian, and products with it, are those of one backward a row."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import NonFiniteError, WorkerError
from tests.backends.least_squares_contract import jacobian as rows
from tests.building import loaded
from tests.workloads import Mlp, difference

torch.manual_seed(0)
X = torch.randn(23, 6, dtype=torch.float64)
Y = torch.randn(23, 4, dtype=torch.float64)


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


class Doubled(torch.autograd.Function):
    """Torch cannot take several backwards of it at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> Any:
        return above * 2.0 if above.sum().item() > -1e9 else None


def by_function(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Doubled.apply(by_method(module, inputs, targets))  # type: ignore[no-untyped-call]
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


def by_coefficients(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Numbers of the module meet residuals with one dimension, each other and constants."""
    inputs = inputs.detach().requires_grad_()
    u = module.second(torch.tanh(module.first(inputs))).sum(1)
    (slope,) = torch.autograd.grad(u.sum(), inputs, create_graph=True)
    found: torch.Tensor = module.shift * u + (module.factor * module.shift.exp() * 2 + module.pair[0]) * slope[:, 1]
    both = torch.stack([found, module.pair.square()[1] * u], dim=1)
    found = both * module.named["a"] + module.pair * targets[:, :2]
    return found


class WithFactors(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor(0.3))
        self.pair, self.named = nn.Parameter(torch.tensor([0.4, 2.0])), nn.ParameterDict({"a": torch.tensor(0.7)})


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


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "by torch.func": (Mlp, difference),
    "tied and not trained": (Tied, difference),
    "with parameters for each sample": (Mlp, slopes),
    "parts of the module": (WithFactors, by_layer),
    "with coefficients": (WithFactors, by_coefficients),
    "with branches": (Mlp, branching),
    "many rows at once": (Scoring, by_method),
    "row by row": (Scoring, by_function),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_products(case: str) -> None:
    """A warning tells of rows that take a backward each: of no case but the last."""
    make, residual = CASES[case]
    torch.manual_seed(1)
    module = make().double()
    expected = residual(module, X, Y)
    j, residuals = rows(module, expected), expected.detach().flatten()
    v = torch.linspace(-1.0, 2.0, j.shape[1]).double()
    with loaded(module, None, X, Y, residual=residual, reduction="sum") as opt, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match="took a backward each") if case == "row by row" else nullcontext():
            normal = opt.normal()
        found = [normal.matrix, normal.vector, opt.residuals(), opt.jvp(v), opt.vjp(expected.detach())]
    for mine, theirs in zip(found, (j.T @ j, j.T @ residuals, residuals, j @ v, j.T @ residuals), strict=True):
        torch.testing.assert_close(mine.flatten(), theirs.flatten(), rtol=1e-12, atol=1e-12)


def complex_numbers(module: Any, inputs: Any, targets: Any) -> torch.Tensor:
    return torch.complex(module(inputs), targets)


def raises(module: Any, inputs: Any, targets: Any) -> torch.Tensor:
    raise ArithmeticError("mine")


DEPENDS = "depend on the other samples of its chunk, or on random numbers"


@pytest.mark.parametrize(
    "residual, words",
    [
        (lambda module, x, y: module(x).sum(), r"`residual` returned shape \(\) for 23 samples"),
        (lambda module, x, y: [module(x)], "`residual` must return a tensor"),
        (complex_numbers, "got torch.complex128: return torch.view_as_real of it"),
        (lambda module, x, y: module(x) - module(x).mean(), DEPENDS),
        (lambda module, x, y: nn.functional.dropout(module(x)), DEPENDS),
        (raises, "mine"),
    ],
)
def test_what_is_no_residual(residual: Any, words: str) -> None:
    with loaded(Mlp().double(), None, X, Y, residual=residual) as opt, pytest.raises(WorkerError, match=words):
        opt.normal()


@pytest.mark.filterwarnings("error:.*took a backward each")
def test_bad_samples_do_not_decide_the_way() -> None:
    def picky(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if inputs.isnan().any():
            raise ArithmeticError("mine")
        return difference(module, inputs, targets)

    module = Mlp().double()
    for residual, error in ((difference, NonFiniteError), (picky, WorkerError)):
        with loaded(module, None, X * torch.nan, Y, residual=residual) as opt:
            with pytest.raises(error):
                opt.normal()
            opt.load(X, Y)
            j = rows(module, difference(module, X, Y))
            torch.testing.assert_close(opt.normal().matrix, j.T @ j / Y.numel(), rtol=1e-12, atol=1e-13)
