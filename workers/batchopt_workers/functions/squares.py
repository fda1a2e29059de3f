"""Losses that are sums of squares, or of robust functions of them: the mean over residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from batchopt_workers.batch.weighting import weighted

# `residual(module, inputs, targets)`: shape `(samples, ...)`.
ResidualFunction = Callable[[torch.nn.Module, Any, Any], torch.Tensor]


class Robust(NamedTuple):
    """A function rho of z = u², as functions of u: `value` rho, `slope` drho/dz, and `curvature`, the slope plus 2 z
    times the second derivative. `value` can be differentiated twice, and none overflows where rho does not."""

    value: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]
    curvature: Callable[[torch.Tensor], torch.Tensor]


def _root(u: torch.Tensor) -> torch.Tensor:
    return torch.hypot(torch.ones_like(u), u)


# The definitions of SciPy's `least_squares`. Curvatures are divided such that overflowing powers make them 0.
ROBUST = {
    "soft_l1": Robust(lambda u: 2 * u * (u / (1 + _root(u))), lambda u: 1 / _root(u), lambda u: _root(u) ** -3),
    "huber": Robust(
        lambda u: torch.where(u.abs() <= 1, u * u, 2 * u.abs() - 1),
        lambda u: 1 / u.abs().clamp(min=1),
        lambda u: (u.abs() <= 1).to(u),
    ),
    "cauchy": Robust(
        lambda u: torch.where(u.abs() < 1, torch.log1p(u * u), 2 * torch.log(_root(u))),
        lambda u: 1 / (1 + u * u),
        lambda u: 2 / (1 + u * u) ** 2 - 1 / (1 + u * u),
    ),
    "arctan": Robust(
        lambda u: torch.atan(u * u),
        lambda u: 1 / (1 + u**4),
        lambda u: 4 / (1 + u**4) ** 2 - 3 / (1 + u**4),
    ),
}
LOSSES = ("linear", *ROBUST)


@dataclass(frozen=True)
class MeanSquare:
    """A loss function: the mean (with the reduction `"sum"`, the sum) over all numbers r that `residual` returns of
    scale² rho((r / scale)²). rho is that of `loss`; for `"linear"` the square itself is used."""

    residual: ResidualFunction
    reduction: str = "mean"
    loss: str = "linear"
    scale: float = 1.0

    def __call__(
        self, module: torch.nn.Module, inputs: Any, targets: Any, sample_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = self.of(checked(self.residual(module, inputs, targets)))
        if sample_weight is not None:
            return weighted(found, sample_weight, self.reduction)
        return found.mean() if self.reduction == "mean" else found.sum()

    def of(self, residuals: torch.Tensor) -> torch.Tensor:
        """Return what each residual adds to the sum."""
        if self.loss == "linear":
            return residuals.square()
        return ROBUST[self.loss].value(residuals / self.scale) * self.scale**2

    def weight(self, weight: float, residuals: int, sample_weight: torch.Tensor | None = None) -> float:
        """Return the weight in f of a residual's contribution, for a sample of weight 1, if the loss of `residuals`
        residuals has the weight `weight`."""
        if self.reduction == "sum" or not residuals:
            return weight
        if sample_weight is None:
            return weight / residuals
        total = float(sample_weight.double().mean()) * residuals
        return weight / total if total else 0.0

    def slope(self, residuals: torch.Tensor) -> torch.Tensor | float:
        """Return the factor of the residual in half of the derivative of `of`."""
        return 1.0 if self.loss == "linear" else ROBUST[self.loss].slope(residuals / self.scale)

    def curvature(self, residuals: torch.Tensor) -> torch.Tensor | float:
        """Return an approximation to half of the second derivative of `of` that is never negative.

        The correction of Triggs, McLauchlan, Hartley and Fitzgibbon ("Bundle adjustment: a modern synthesis", 2000,
        section 4.3), bounded from below as in SciPy.
        """
        if self.loss == "linear":
            return 1.0
        return ROBUST[self.loss].curvature(residuals / self.scale).clamp(min=torch.finfo(residuals.dtype).eps)

    def roots(self, residuals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return roots of the values of `of`, signed like the residuals, and their derivatives by the residuals."""
        if self.loss == "linear":
            return residuals, torch.ones_like(residuals)
        u, robust = residuals / self.scale, ROBUST[self.loss]
        root = robust.value(u).sqrt() * u.sign()
        return root * self.scale, torch.where(root == 0, 1.0, robust.slope(u) * u / root)


def of_residuals(sample_weight: torch.Tensor | None, residuals: torch.Tensor) -> torch.Tensor | float:
    """Return the weight of the sample of each residual, in the shape of `residuals`, with equally many per sample; 1
    without weights."""
    if sample_weight is None:
        return 1.0
    weights = sample_weight.reshape(-1).to(residuals)
    each = residuals.numel() // max(len(weights), 1)
    return weights.repeat_interleave(each).view_as(residuals)


def difference(module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    """Return the residual whose mean square is `torch.nn.MSELoss`: output minus target."""
    found: torch.Tensor = module(inputs) - targets
    return found


def squares_of(criterion: Any, loss_fn: Any) -> MeanSquare | None:
    """Return the residuals of a criterion or a loss function; None if they are unknown."""
    if isinstance(loss_fn, MeanSquare):
        return loss_fn
    if loss_fn is None and type(criterion) is torch.nn.MSELoss and criterion.reduction in ("mean", "sum"):
        return MeanSquare(difference, criterion.reduction)
    return None


def checked(residuals: Any, samples: int | None = None) -> torch.Tensor:
    """Return what a residual function returned. Raise `TypeError` or `ValueError` if it is not a real tensor with a row
    for each of the `samples` samples (None: any number)."""
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
