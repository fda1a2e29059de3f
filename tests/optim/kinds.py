"""All optimizers of ours, and functions for them to minimise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

import batchopt
from batchopt.optim.minimizer import Minimizer, Result
from batchopt.optim.squares import ResidualSquares

Make = Callable[..., Any]
Function = Callable[[torch.Tensor], torch.Tensor]


def boxed(make: Make) -> Make:
    """With bounds that a path may touch, but no minimum, in the units of the start."""

    def made(parameters: Any, **options: Any) -> Any:
        parameters = list(parameters)
        size = 8 * max(float(parameter.detach().abs().max()) for parameter in parameters if parameter.numel())
        bounds = [None if not size or parameter.is_complex() else (-size, size) for parameter in parameters]
        return make(parameters, bounds=bounds, **options)

    return made


SEARCHES: dict[str, Make] = {
    "lbfgs": batchopt.LBFGS,
    "lbfgs in a box": boxed(batchopt.LBFGS),
    "lbfgs armijo": functools.partial(batchopt.LBFGS, line_search_fn="armijo"),
    "cg": batchopt.CG,
    "ssbroyden": batchopt.SSBroyden,
}
OF_SQUARES: dict[str, Make] = {
    "lm": functools.partial(batchopt.LevenbergMarquardt, scaling="diagonal"),
    "lm identity": functools.partial(batchopt.LevenbergMarquardt, scaling="identity"),
    "lm geodesic": functools.partial(batchopt.LevenbergMarquardt, geodesic=True),
    "lm in a box": boxed(batchopt.LevenbergMarquardt),
    "lm longest": functools.partial(batchopt.LevenbergMarquardt, step="longest", geodesic=True),
    "lm longest in a box": boxed(functools.partial(batchopt.LevenbergMarquardt, step="longest")),
    "lm products": functools.partial(batchopt.LevenbergMarquardt, dense=0),
}
KINDS = {**SEARCHES, **OF_SQUARES}
# One of each algorithm, and a box, cover every branch; the others differ from these in a formula.
FEW = {name: KINDS[name] for name in ("lbfgs", "lbfgs in a box", "cg", "ssbroyden", "lm")}
NO_END: dict[str, Any] = {"tolerance_grad": 0.0, "tolerance_change": 0.0}


def value(function: Function) -> Function:
    """f of residuals: the sum of their squares; of a function of one value that value."""

    def f(x: torch.Tensor) -> torch.Tensor:
        found = function(x)
        return found.square().sum() if found.dim() else found

    return f


def valley(x: torch.Tensor) -> torch.Tensor:
    """The residuals of Rosenbrock's function."""
    return torch.cat([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])


def logits(x: torch.Tensor) -> torch.Tensor:
    """The roots of the losses of a logistic regression, and of a small penalty."""
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(60, len(x), generator=random, dtype=torch.float64).to(x)
    return torch.cat([(torch.nn.functional.softplus(-rows @ x) / 60).sqrt(), 0.1 * x])


rosenbrock, logistic = value(valley), value(logits)


def start(n: int = 6, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1.2, 1.0, n, dtype=torch.float64).to(dtype)


class _Noted(ResidualSquares):
    """A closure for Levenberg-Marquardt that notes f."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.found, problem.parameters)
        self._note = problem.note

    def __call__(self) -> torch.Tensor:
        return self._note(super().__call__)

    def losses(self, points: torch.Tensor) -> torch.Tensor:
        one = super().losses
        return torch.stack([self._note(functools.partial(lambda at: one(at)[0], point[None])) for point in points])


class Problem:
    """A function of parameters of three shapes, whose residuals are given, or f; and an optimizer over them."""

    def __init__(self, make: Make, function: Function, start: torch.Tensor, **options: Any) -> None:
        self.function = function
        self.parameters = [torch.nn.Parameter(part.clone()) for part in start.tensor_split((1, max(len(start) - 2, 1)))]
        self.optimizer: Minimizer = make(self.parameters, **options)
        self.values: list[float] = []

    @property
    def x(self) -> torch.Tensor:
        return torch.cat([parameter.detach() for parameter in self.parameters])

    def found(self) -> torch.Tensor:
        return self.function(torch.cat(list[torch.Tensor](self.parameters)))

    def note(self, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            f = evaluate()
        except batchopt.NonFiniteError:
            self.values.append(math.nan)
            raise
        self.values.append(f.item())
        return f

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        f = self.note(lambda: value(lambda _: self.found())(self.x))
        f.backward()  # type: ignore[no-untyped-call]
        return f

    def step(self) -> Result:
        squares = isinstance(self.optimizer, batchopt.LevenbergMarquardt)
        first = torch.as_tensor(self.optimizer.step(_Noted(self) if squares else self.closure)).detach()
        torch.testing.assert_close(first.item(), self.values[-self.result.evaluations], rtol=0, atol=0, equal_nan=True)
        return self.result

    @property
    def result(self) -> Result:
        assert self.optimizer.result is not None
        return self.optimizer.result
