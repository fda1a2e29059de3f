"""f of the loaded batch as optimizers call it: a closure, or a tensor with a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchopt._engine.engine import Engine
from batchopt._functions.derivatives import evaluate_many
from batchopt._functions.least_squares import Normal, accelerations, gauss_newton_product, normal, weighted_rows
from batchopt.errors import BatchoptError
from batchopt.optim.quadratic import Rows
from batchopt_workers.functions.subspace import Basis
from batchopt_workers.wire.layout import Layout


class Closure:
    """A closure that evaluates f and df/dX of the loaded batch. Where f is a sum of squares it also provides the normal
    equations, for `LevenbergMarquardt`."""

    def __init__(self, engine: Engine, evaluate: Callable[[], torch.Tensor]) -> None:
        """Evaluate the function by calling `evaluate`."""
        self._engine, self._evaluate = engine, evaluate

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The module's trainable parameters, in the order of X."""
        return self._engine.subject.parameters

    def __call__(self) -> torch.Tensor:
        """Evaluate f and df/dX, like `BatchOptimizer.evaluate`."""
        return self._evaluate()

    def normal(self, limit: int, basis: Basis | None = None) -> Normal:
        """Return the normal equations, like `BatchOptimizer.normal`; of J times the vectors of the `basis`, if
        given."""
        return normal(self._engine, limit, basis)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """Return a Gauss-Newton product, like `BatchOptimizer.gauss_newton`."""
        return gauss_newton_product(self._engine, v)

    def rows(self, most: int) -> Rows | None:
        """Return the rows of J with their weights, float64; None if there are more than `most`."""
        return weighted_rows(self._engine, most)

    def accelerations(self, directions: torch.Tensor) -> torch.Tensor:
        """Return JᵀW times the second derivative of the residuals along each row: shape `(k, n)`, X's dtype."""
        return accelerations(self._engine, directions)

    def losses(self, points: torch.Tensor) -> torch.Tensor:
        """Return f at several points, like `BatchOptimizer.evaluate_many`."""
        found = evaluate_many(self._engine, points, False)
        assert isinstance(found, torch.Tensor)  # without gradients
        return found


def loss_with_graph(engine: Engine, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return f of the loaded batch: 0-dim, float64; its `backward` adds df/dX to each `.grad`."""
    subject = engine.subject
    subject.renew_gradient()
    with subject.keeping_gradients():
        loss = evaluate()
        places = _Places(subject.flat.layout, [parameter.grad is not None for parameter in subject.parameters])
    lent, parameters = subject.lend_gradient(), subject.parameters
    found: torch.Tensor = _Loss.apply(loss, lent, places, *parameters)  # type: ignore[no-untyped-call]
    return found


def of_second_derivatives(optimizer: torch.optim.Optimizer, error: RuntimeError) -> BatchoptError | None:
    """Return the error that says so, if the optimizer's own shows that it differentiates the gradient, as AdaHessian
    does."""
    if isinstance(error, BatchoptError) or "grad_fn" not in str(error):
        return None
    return BatchoptError(
        f"{type(optimizer).__name__} differentiates the gradient, and workers return it without a graph ({error}): use "
        "opt.hvp(v), products of the Hessian with vectors (for AdaHessian and SophiaH, which estimate its diagonal: "
        "signs * opt.hvp(signs)), or a method of scipy.optimize on opt.objective(), such as "
        "newton-cg with hessp=objective.hvp (docs/solvers.md)"
    )


class _Places(NamedTuple):
    """The layout of the parameters in df/dX, and a flag per parameter: whether f depends on it."""

    layout: Layout
    used: list[bool]


class _Loss(torch.autograd.Function):
    """f as an autograd function whose gradient (shape `(n,)`) is already known."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradient: torch.Tensor, places: _Places, *_: torch.nn.Parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        ctx.places = places
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        if torch.is_grad_enabled():
            raise BatchoptError(
                "loss() was differentiated with create_graph=True, and workers return the first derivative alone: for "
                "the second use hvp(v), products of the Hessian with vectors"
            )
        (gradient,), places = ctx.saved_tensors, ctx.places
        if above[0] != 1.0 or _may_come_again():
            gradient = gradient * above[0].to(gradient.dtype)
        views = places.layout.views(gradient)
        return None, None, None, *(view if used else None for view, used in zip(views, places.used, strict=True))


def _may_come_again() -> bool:
    """Tell whether this backward retains the graph. If not, autograd owns the saved gradient: it becomes `.grad`
    without a copy, and others may be added to it in place."""
    retains = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return retains is None or bool(retains())
