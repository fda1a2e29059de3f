"""Losses that are sums of squares, or of robust functions of them: the mean over residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from batchopt_workers.map.weighting import weighted

# `residual(module, inputs, targets)`: shape `(samples, ...)`.
ResidualFunction = Callable[[torch.nn.Module, Any, Any], torch.Tensor]


class Robust(NamedTuple):
    """A function rho of z = u², as functions of u: `value` rho, `slope` drho/dz, and `curvature`, the slope plus 2 z
    times the second derivative. The first can be differentiated twice, and none overflows where rho does not."""

    value: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]
    curvature: Callable[[torch.Tensor], torch.Tensor]


def _root(u: torch.Tensor) -> torch.Tensor:
    return torch.hypot(torch.ones_like(u), u)


# As SciPy's `least_squares` defines them. Curvatures are divided so that powers that overflow make them 0.
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
    """A loss function: the mean over all numbers r that `residual` returns of scale² rho((r / scale)²), where rho is
    that of `loss`, of `"linear"` the square itself; with the reduction `"sum"`, their sum."""

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
        """What each residual adds to the sum."""
        if self.loss == "linear":
            return residuals.square()
        return ROBUST[self.loss].value(residuals / self.scale) * self.scale**2

    def weight(self, weight: float, residuals: int, sample_weight: torch.Tensor | None = None) -> float:
        """The weight in f of what a residual of a sample of weight 1 adds, where the loss of so many residuals counts
        `weight`."""
        if self.reduction == "sum" or not residuals:
            return weight
        if sample_weight is None:
            return weight / residuals
        total = float(sample_weight.double().mean()) * residuals
        return weight / total if total else 0.0

    def slope(self, residuals: torch.Tensor) -> torch.Tensor | float:
        """What the residual is multiplied with in half of the derivative of `of`."""
        return 1.0 if self.loss == "linear" else ROBUST[self.loss].slope(residuals / self.scale)

    def curvature(self, residuals: torch.Tensor) -> torch.Tensor | float:
        """What is taken as half of the second derivative of `of`: never negative.

        The correction of Triggs, McLauchlan, Hartley and Fitzgibbon ("Bundle adjustment: a modern synthesis", 2000,
        section 4.3), bounded from below as SciPy does.
        """
        if self.loss == "linear":
            return 1.0
        return ROBUST[self.loss].curvature(residuals / self.scale).clamp(min=torch.finfo(residuals.dtype).eps)

    def roots(self, residuals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers whose squares are those of `of`, with the signs of the residuals, and their derivatives by them."""
        if self.loss == "linear":
            return residuals, torch.ones_like(residuals)
        u, robust = residuals / self.scale, ROBUST[self.loss]
        root = robust.value(u).sqrt() * u.sign()
        return root * self.scale, torch.where(root == 0, 1.0, robust.slope(u) * u / root)


def of_residuals(sample_weight: torch.Tensor | None, residuals: torch.Tensor) -> torch.Tensor | float:
    """The weights of samples, of each of their residuals: in the shape of these, as many for each sample; 1 where there
    are none."""
    if sample_weight is None:
        return 1.0
    weights = sample_weight.reshape(-1).to(residuals)
    each = residuals.numel() // max(len(weights), 1)
    return weights.repeat_interleave(each).view_as(residuals)


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
