"""The rules of finite differences: the points where a function is evaluated, and the factors of its values."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch

Method = Literal["2-point", "3-point", "cs"]
# The power of the dtype's rounding by which each method moves a parameter, as a fraction of it.
_POWERS = {"2-point": 1 / 2, "3-point": 1 / 3, "cs": 1 / 2}


class Range(NamedTuple):
    """The lowest and the highest value of the elements of a parameter: tensors, or numbers."""

    low: Any
    high: Any


class Move(NamedTuple):
    """The points for the derivative by one element of X: by how much it is moved each time, the factors of the values
    there, and that of the value at X itself."""

    steps: tuple[float, ...]
    factors: tuple[float, ...]
    base: float


class Rule:
    """The way in which derivatives are taken: arguments as of `finite_differences`."""

    def __init__(self, method: str, step: float | None, bounds: Mapping[str, Any] | None) -> None:
        if method not in _POWERS:
            raise ValueError(f"`method` must be one of {', '.join(map(repr, _POWERS))}; got {method!r}")
        if step is not None and not (isinstance(step, Real) and 0 < float(step) < 1):
            raise ValueError(f"`step` must be a number between 0 and 1, the fraction of a parameter; got {step!r}")
        self.method, self.step = method, step
        self.bounds = {name: _range(name, pair) for name, pair in (bounds or {}).items()}

    def move(self, x: float, dtype: torch.dtype, low: float, high: float) -> Move:
        """Return where to evaluate for an element `x` of that dtype within bounds."""
        step = self.step * abs(x) if self.step else 0.0
        step = step or torch.finfo(dtype).eps ** _POWERS[self.method] * max(1.0, abs(x))
        if self.method == "cs":
            return Move((step,), (1 / step,), 0.0)
        above, below = max(high - x, 0.0), max(x - low, 0.0)
        if not above and not below:
            return Move((), (), 0.0)
        if self.method == "2-point":
            step = -step if x < 0 else step  # away from 0, as in SciPy
            if not -below <= step <= above:
                step = -step if -below <= -step <= above else (above if above >= below else -below)
            step = _exact(x, step, dtype)
            return Move((step,), (1 / step,), -1 / step)
        if step <= min(above, below):
            step = _exact(x, step, dtype)
            return Move((step, -step), (0.5 / step, -0.5 / step), 0.0)
        room = max(above, below) / 2
        step = _exact(x, min(step, room) if above >= below else -min(step, room), dtype)
        return Move((step, 2 * step), (2 / step, -0.5 / step), -1.5 / step)


def _exact(x: float, step: float, dtype: torch.dtype) -> float:
    """Return about this step, one by which `x` can be moved without rounding."""
    return float(torch.tensor(x + step, dtype=dtype)) - x or step


def _range(name: str, pair: Any) -> Range:
    try:
        low, high = pair
    except (TypeError, ValueError):
        raise TypeError(
            f"`bounds` of finite_differences must be pairs (low, high) by name; got {name}: {pair!r}"
        ) from None
    return Range(-torch.inf if low is None else low, torch.inf if high is None else high)
