"""f of the loaded batch as optimizers ask for it: as a closure, and as a tensor with a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchopt._function.function import BatchFunction
from batchopt._function.least_squares import Normal, acceleration, gauss_newton_product, normal
from batchopt.errors import BatchoptError
from batchopt_workers.data.layout import Layout


class Closure:
    """A closure: `closure()` evaluates f and df/dX of the loaded batch. Where f is a sum of squares it has the normal
    equations, too, which `LevenbergMarquardt` asks for."""

    def __init__(self, function: BatchFunction, evaluate: Callable[[], torch.Tensor]) -> None:
        """`evaluate` the function by this."""
        self._function, self._evaluate = function, evaluate

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The module's trainable ones, in the order in which X has them."""
        return self._function.subject.parameters

    def __call__(self) -> torch.Tensor:
        """As `BatchOptimizer.evaluate`."""
        return self._evaluate()

    def normal(self, limit: int) -> Normal:
        """As `BatchOptimizer.normal`."""
        return normal(self._function, limit)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """As `BatchOptimizer.gauss_newton`."""
        return gauss_newton_product(self._function, v)

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        """JᵀW times the second derivative of the residuals along `v`: shape `(n,)`, X's dtype."""
        return acceleration(self._function, v)


def loss_with_graph(function: BatchFunction, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
    """f of the loaded batch, by `evaluate`: a 0-dim tensor, float64, whose `backward` adds df/dX to each `.grad`."""
    subject = function.subject
    subject.renew_gradient()
    with subject.keeping_gradients():
        loss = evaluate()
        places = _Places(subject.flat.layout, [parameter.grad is not None for parameter in subject.parameters])
    found: torch.Tensor = _Loss.apply(loss, subject.lend_gradient(), places, *subject.parameters)  # type: ignore[no-untyped-call]
    return found


class _Places(NamedTuple):
    """Where each parameter lies in df/dX, and which of them f depends on."""

    layout: Layout
    used: list[bool]


class _Loss(torch.autograd.Function):
    """f, whose gradient (shape `(n,)`) is known before anybody asks for it."""

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
    """Whether this backward retains the graph. If not, what was saved is autograd's, which makes `.grad` of it without
    a copy, and may add other gradients in place."""
    retains = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return retains is None or bool(retains())
