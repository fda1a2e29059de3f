"""Bounds on parameters: the box of all elements, and the minimum of a quadratic model within it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from batchopt.optim.algebra import dot
from batchopt.optim.vector import Vector

# Pairs (lower, upper), each a number, a tensor of the parameter's shape or None: by parameter or name, or in a list.
Bounds = Mapping[Any, Any] | Sequence[Any] | None

# A step at which some elements are held: given which and their moves, the step, and the model's gradient after it; None
# where the model has no such step.
Solve = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]

# Most active sets tried for one model: at first any; then elements are no longer released, which ends a cycle.
ANY, GROWING = 10, 10
# An element that comes this close to a bound, in units of rounding, is at it.
AT = 4.0


@dataclass(frozen=True)
class Box:
    """Lower and upper bounds of all elements (shapes `(n,)`), of the parameters with these names or positions."""

    lower: torch.Tensor
    upper: torch.Tensor

    def limits(self, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lowest and the highest move of each element from `x`, in the precision of `like`."""
        return self.lower.to(like) - x, self.upper.to(like) - x

    def leaves(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Tell which elements a step leaves between their bounds."""
        low, high = self.limits(x, step)
        return (low < step) & (step < high)

    @property
    def finite(self) -> torch.Tensor:
        """Tell which elements have a bound."""
        return self.lower.isfinite() | self.upper.isfinite()

    def holding(self, x: torch.Tensor, vector: Vector) -> Box:
        """Return the box in which parameters that require no gradient stay where they are."""
        moving = torch.ones_like(x)
        vector.hold_frozen(moving)
        return Box(torch.where(moving == 0, x, self.lower), torch.where(moving == 0, x, self.upper))

    def clamp(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the nearest point of the box, in `out`."""
        return torch.clamp(x, self.lower, self.upper, out=out)

    def place(self, x: torch.Tensor, move: torch.Tensor, out: torch.Tensor) -> None:
        """Write `x + move` to `out`, in the box; what arrives at a bound but for rounding is there exactly."""
        torch.add(x, move, out=out)
        self.clamp(out, out)
        for bound in (self.lower, self.upper):
            near = (out - bound).abs() <= AT * torch.finfo(x.dtype).eps * (bound.abs() + move.abs())
            torch.where(near & bound.isfinite(), bound, out, out=out)

    def farthest(self, x: torch.Tensor, direction: torch.Tensor) -> float:
        """Return the largest step along `direction` that stays in the box, at least 1."""
        steps = torch.where(direction < 0, self.lower - x, self.upper - x) / direction
        return max(1.0, float(torch.where(direction == 0, math.inf, steps).min()))

    def active(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Tell which elements are at a bound, and would not lower f by leaving it."""
        below, above = (x <= self.lower) & (gradient >= 0), (x >= self.upper) & (gradient <= 0)
        return below | above | (self.lower == self.upper)

    def projected(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, 0 where a bound is active."""
        return gradient.masked_fill(self.active(x, gradient), 0.0)

    def step(
        self, x: torch.Tensor, gradient: torch.Tensor, solve: Solve, enough: float = math.inf
    ) -> torch.Tensor | None:
        """Return the step to the minimum of a convex quadratic model over the box, by the primal-dual active set method
        of Hintermüller, Ito and Kunisch, "The primal-dual active set strategy as a semismooth Newton method", SIAM
        Journal on Optimization 13, 2002. Ends early with a step that, projected, falls along the gradient by `enough`
        of what it falls by itself; where that does not end, the step is the last one, projected."""
        low, high = self.limits(x, gradient)
        fixed = low == high
        below, above = fixed | ((low >= 0) & (gradient > 0)), ~fixed & (high <= 0) & (gradient < 0)
        step = torch.zeros_like(gradient)
        for i in range(ANY + GROWING):
            found = solve(below | above, torch.where(below, low, torch.where(above, high, 0.0)))
            if found is None:
                return None
            step, slope = found
            if dot(gradient, step.clamp(low, high)) <= -enough * abs(dot(gradient, step)):
                break
            held, release = below | above, i < ANY
            under = torch.where(held, below & (fixed | (slope > 0) | (not release)), step < low)
            over = torch.where(held, above & ((slope < 0) | (not release)), step > high)
            if torch.equal(under, below) and torch.equal(over, above):
                break
            below, above = under, over
        return step.clamp(low, high)


def read_bounds(given: Any, parameters: Sequence[torch.Tensor], names: Sequence[str], vector: Vector) -> Box | None:
    """Return the box that `bounds` describes; None if nothing is bounded. Raises `ValueError` or `TypeError` that names
    the first bound that cannot work."""
    if isinstance(given, Mapping):
        places: dict[Any, int] = {name: i for i, name in enumerate(names)}
        places |= {parameter: i for i, parameter in enumerate(parameters)}
        pairs: list[Any] = [None] * len(parameters)
        for key, pair in given.items():
            if key not in places:
                raise ValueError(
                    f"`bounds` has {_label(key)}, which is none of the optimizer's parameters"
                    + (f": {', '.join(names)}" if names else "; names need module.named_parameters() as `params`")
                )
            pairs[places[key]] = pair
    elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) == len(parameters):
        pairs = list(given)
    else:
        raise TypeError(
            f"`bounds` must be a dictionary from parameters or their names to pairs (lower, upper), or a list of "
            f"{len(parameters)} pairs, one per parameter; got {given!r}"
        )
    labels = list(names) or [f"parameter {i}" for i in range(len(parameters))]
    sides = [_sides(*triple) for triple in zip(labels, parameters, pairs, strict=True)]
    lower, upper = (torch.cat([side[i].reshape(-1) for side in sides]).to(vector.empty()) for i in (0, 1))
    box = Box(lower, upper)
    return box if bool(box.finite.any()) else None


def _label(key: Any) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)


def _sides(label: str, parameter: torch.Tensor, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper bound of each element, in the parameter's precision."""
    kind = parameter.dtype.to_real()
    if pair is None:
        endless = torch.full((parameter.numel() * (1 + parameter.is_complex()),), math.inf, dtype=kind)
        return -endless, endless
    if parameter.is_complex():
        raise ValueError(f"`bounds` of {label}: complex numbers have no order; bound torch.view_as_real of a parameter")
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(f"`bounds` of {label} must be a pair (lower, upper); got {pair!r}")
    sides = []
    for bound, none in zip(pair, (-math.inf, math.inf), strict=True):
        if not isinstance(bound, (Real, torch.Tensor, type(None))):
            raise TypeError(f"`bounds` of {label} must be numbers, tensors of its shape or None; got {bound!r}")
        number = none if bound is None else bound
        tensor = number.detach() if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=torch.float64)
        side = tensor.to(parameter.device, kind)
        if side.dim() and side.shape != parameter.shape:
            raise ValueError(
                f"`bounds` of {label} must be numbers or have its shape, {tuple(parameter.shape)}; got "
                f"{tuple(side.shape)}"
            )
        sides.append(side.expand(parameter.shape))
    lower, upper = sides
    if not bool((lower <= upper).all() and (lower < math.inf).all() and (upper > -math.inf).all()):
        raise ValueError(f"`bounds` of {label}: each lower bound must be <= its upper bound, and no NaN; got {pair!r}")
    return lower, upper
