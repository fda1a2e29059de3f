"""f as a tensor of torch's autograd: evaluated by the workers, differentiated by the gradient that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchopt._function.function import BatchFunction
from batchopt.errors import BatchoptError
from batchopt_workers.layout import Layout


def loss_with_graph(function: BatchFunction, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
    """f of the loaded batch, by `evaluate`: a 0-dim tensor, float64, whose `backward` adds df/dX to each `.grad`."""
    subject = function.subject
    with subject.keeping_gradients():
        loss = evaluate()
        used = [parameter.grad is not None for parameter in subject.parameters]
    known = _KnownGradient(subject.gradient.clone(), subject.flat.layout, used)
    found: torch.Tensor = _Loss.apply(loss, known, *subject.parameters)  # type: ignore[no-untyped-call]
    return found


class _KnownGradient(NamedTuple):
    """df/dX (shape `(n,)`), where each parameter lies in it, and which of them f depends on."""

    gradient: torch.Tensor
    layout: Layout
    used: list[bool]


class _Loss(torch.autograd.Function):
    """f, whose gradient is known before anybody asks for it."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, known: _KnownGradient, *_: torch.nn.Parameter) -> torch.Tensor:
        ctx.known = known
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        if torch.is_grad_enabled():
            raise BatchoptError(
                "loss() was differentiated with create_graph=True, and workers return the first derivative alone: for "
                "the second use hvp(v), products of the Hessian with vectors"
            )
        known: _KnownGradient = ctx.known
        scaled = known.gradient * above[0].to(known.gradient.dtype)
        views = known.layout.views(scaled)
        return None, None, *(view if used else None for view, used in zip(views, known.used, strict=True))
