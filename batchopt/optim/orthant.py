"""Minimising with an L1 penalty: f has a kink wherever a parameter is 0, so each step stays within one orthant.

Andrew and Gao, "Scalable training of L1-regularized log-linear models", ICML 2007 (OWL-QN).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchopt.optim.algebra import absolute_sum, add, dot
from batchopt.optim.line import Closure, Function, Line, Point
from batchopt.optim.vector import Vector


class PenalisedFunction(Function):
    """f plus `l1` times the sum of the parameters' absolute values; the gradient is f's alone."""

    def __init__(self, vector: Vector, closure: Closure, l1: float) -> None:
        super().__init__(vector, closure)
        self._l1 = l1

    def _evaluate(self, point: Point) -> torch.Tensor | float:
        value = super()._evaluate(point)
        point.f += self._l1 * absolute_sum(point.x)
        return value


def pseudo_gradient(x: torch.Tensor, gradient: torch.Tensor, l1: float, out: torch.Tensor) -> torch.Tensor:
    """The gradient of f plus penalty; where a parameter is 0, the one-sided slope that leads down, or 0 if none
    does."""
    torch.add(gradient, x.sign(), alpha=l1, out=out)
    at_zero = (gradient + l1).clamp_max(0.0) + (gradient - l1).clamp_min(0.0)
    return torch.where(x == 0, at_zero, out, out=out)


def project(direction: torch.Tensor, pseudo: torch.Tensor) -> None:
    """Set to 0 each element of `direction` that does not lead down."""
    direction.mul_(direction * pseudo < 0)


class OrthantLine(Line):
    """Points of a line, projected to the orthant that the start, or where it is 0 the steepest descent, lies in."""

    def __init__(
        self, function: Function, start: Point, direction: torch.Tensor, spare: Sequence[Point], pseudo: torch.Tensor
    ) -> None:
        super().__init__(function, start, direction, spare)
        self._pseudo = pseudo
        self._orthant = torch.where(start.x == 0, -pseudo.sign(), start.x.sign())

    def place(self, step: float, x: torch.Tensor) -> None:
        add(self.start.x, self.direction, step, out=x)
        x.mul_(x * self._orthant > 0)

    def slope(self, point: Point) -> float:
        """At the start, that of f plus penalty."""
        return dot(self._pseudo, self.direction) if point is self.start else super().slope(point)
