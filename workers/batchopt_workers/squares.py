"""Losses that are sums of squares: the mean square of residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# `residual(module, inputs, targets)`: shape `(samples, ...)`.
ResidualFunction = Callable[[torch.nn.Module, Any, Any], torch.Tensor]


@dataclass(frozen=True)
class MeanSquare:
    """A loss function: the mean square of all numbers that `residual` returns; with the reduction `"sum"`, the sum of
    their squares."""

    residual: ResidualFunction
    reduction: str = "mean"

    def __call__(self, module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        found = checked(self.residual(module, inputs, targets))
        return found.square().mean() if self.reduction == "mean" else found.square().sum()

    def weight(self, weight: float, residuals: int) -> float:
        """The weight of each square in f, where the loss of so many residuals counts `weight`."""
        return weight / residuals if self.reduction == "mean" and residuals else weight


def difference(module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    """The residual whose mean square is `torch.nn.MSELoss`: output less target."""
    found: torch.Tensor = module(inputs) - targets
    return found


def squares_of(criterion: Any, loss_fn: Any) -> MeanSquare | None:
    """The residuals of a criterion, or of a loss function; None if they are not known."""
    if isinstance(loss_fn, MeanSquare):
        return loss_fn
    if loss_fn is None and type(criterion) is torch.nn.MSELoss and criterion.reduction in ("mean", "sum"):
        return MeanSquare(difference, criterion.reduction)
    return None


def checked(residuals: Any, samples: int | None = None) -> torch.Tensor:
    """What a residual function returned. Raises `TypeError` or `ValueError` for what is no real tensor with a row for
    each of so many samples (None: any number)."""
    if not isinstance(residuals, torch.Tensor):
        raise TypeError(f"`residual` must return a tensor, one row a sample; got {type(residuals).__name__}")
    if not residuals.is_floating_point():
        hint = ": return torch.view_as_real of it" if residuals.is_complex() else ""
        raise TypeError(f"`residual` must return real floating-point numbers; got {residuals.dtype}{hint}")
    if samples is not None and residuals.shape[:1] != (samples,):
        raise ValueError(
            f"`residual` returned shape {tuple(residuals.shape)} for {samples} samples: the first dimension has to be "
            "the samples"
        )
    return residuals
