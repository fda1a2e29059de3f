"""The rules of finite differences: the points where a function is evaluated, and the factors of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch

Method = Literal["2-point", "3-point", "cs"]
# The power of the dtype's rounding by which each method moves a parameter, as a fraction of it.
_POWERS = {"2-point": 1 / 2, "3-point": 1 / 3, "cs": 1 / 2}


class Rule:
    """The way in which derivatives are taken: arguments as of `finite_differences`. `checked`: the process in which the
    function, called again, returned the same."""

    def __init__(self, method: str, step: float | None, bounds: Mapping[str, Any] | None) -> None:
        if method not in _POWERS:
            raise ValueError(f"`method` must be one of {', '.join(map(repr, _POWERS))}; got {method!r}")
        if step is not None and not (isinstance(step, Real) and 0 < float(step) < 1):
            raise ValueError(f"`step` must be a number between 0 and 1, the fraction of a parameter; got {step!r}")
        self.method, self.step, self.bounds, self.checked = method, step, dict(bounds or {}), 0
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in self.bounds.values()):
            raise TypeError(f"`bounds` of finite_differences must be pairs (low, high) by name; got {bounds!r}")

    def check(self, name: str, x: torch.Tensor) -> None:
        """Raise `TypeError` or `ValueError` for a parameter by which there is no such derivative."""
        if x.is_complex() or x.layout is not torch.strided or x.is_meta:
            raise TypeError(
                f"finite_differences moves real numbers in dense memory, and {name!r} is {x.dtype}, {x.layout}, on "
                f"{x.device}: make it two real ones, .to_dense(), or freeze it by requires_grad_(False)"
            )
        least = torch.finfo(x.dtype).eps
        if self.method != "cs" and self.step is not None and self.step < least:
            raise ValueError(
                f"`step` is {self.step:.2g}, by which {name!r} cannot be moved in {x.dtype}: it must be {least:.2g} at "
                f"least; the default, {least ** _POWERS[self.method]:.1g}, is best for exact functions"
            )

    def moves(self, dtype: torch.dtype, x: float, low: float, high: float) -> list[tuple[complex, float]]:
        """Return where to evaluate for the derivative by an element `x` of that dtype within bounds: by how much it is
        moved, and the factor of the change of the values there."""
        info, step = torch.finfo(dtype), (self.step or 0.0) * abs(x)
        if step < info.tiny:
            step = info.eps ** _POWERS[self.method] * max(1.0, abs(x))
        if self.method == "cs":
            return [(1j * step, 1 / step)]
        above, below = max(high - x, 0.0), max(x - low, 0.0)
        if self.method == "3-point" and step <= min(above, below):
            step = _exact(x, step, dtype)
            return [(step, 0.5 / step), (-step, -0.5 / step)]
        room = above if above >= below else -below  # up to the farther bound
        if self.method == "3-point":
            near = _exact(x, math.copysign(min(step, abs(room) / 2), room), dtype)
            if near and abs(2 * near) <= abs(room):  # else there are no two numbers within the bounds
                return [(near, 2 / near), (2 * near, -0.5 / near)]
        fits = step <= (below if x < 0 else above)  # away from 0, as in SciPy
        step = _exact(x, math.copysign(min(step, abs(room)), (x or 1.0) if fits else room), dtype)
        return [(step, 1 / step)] if step else []


def _exact(x: float, step: float, dtype: torch.dtype) -> float:
    """Return about this step, one by which `x` can be moved without rounding."""
    return float(torch.tensor(x + step, dtype=dtype)) - x
