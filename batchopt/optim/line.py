"""f along a line for line searches: a function of the step length, with the last and the best point evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from batchopt.errors import NonFiniteError
from batchopt.optim.algebra import add, dot, largest
from batchopt.optim.linesearch import TrialPoint
from batchopt.optim.vector import Vector

Closure = Callable[[], "torch.Tensor | float"]


@dataclass
class Point:
    """Parameters `x`, with f and its gradient (shapes `(n,)`), in reused memory; `number` of the evaluation, from 1
    on."""

    x: torch.Tensor
    gradient: torch.Tensor
    f: float = math.nan
    number: int = 0

    @property
    def finite(self) -> bool:
        """Tell whether f and each element of the gradient are finite."""
        return math.isfinite(self.f) and math.isfinite(largest(self.gradient))


class Function:
    """f and df/dX of a closure at given parameters, with a count of evaluations."""

    def __init__(self, vector: Vector, closure: Closure) -> None:
        self._vector, self._closure = vector, closure
        self.evaluations = 0
        self.not_finite = 0  # trials among these where f or the gradient was not
        self.is_evaluating = False

    def here(self, point: Point) -> torch.Tensor | float:
        """Evaluate at the current parameters, into `point`; return the closure's result."""
        self._vector.read(point.x)
        return self._evaluate(point)

    def at(self, point: Point) -> None:
        """Evaluate at `point.x`; if the closure raises `NonFiniteError`, f is infinite."""
        self._vector.write(point.x)
        try:
            self._evaluate(point)
        except NonFiniteError:
            point.f, self.is_evaluating = math.inf, False

    def _evaluate(self, point: Point) -> torch.Tensor | float:
        self.evaluations += 1
        point.number = self.evaluations
        self.is_evaluating = True  # and stays so if the closure raises what ends the step
        with torch.enable_grad():
            value = self._closure()
        self.is_evaluating = False
        point.f = float(value.detach() if isinstance(value, torch.Tensor) else value)
        self._vector.read_gradient(point.gradient)
        return value


class Line:
    """phi(t) = f(x + t d), for a line search; keeps the last point evaluated and the best one before it. `start` is not
    changed; `spare` is memory for two points."""

    def __init__(self, function: Function, start: Point, direction: torch.Tensor, spare: Sequence[Point]) -> None:
        self.start, self.direction = start, direction
        self._function = function
        self._last, self._best = spare
        self._last.f = self._best.f = math.inf
        self.last_step = math.nan
        self.samples: list[TrialPoint] = []

    def __call__(self, step: float) -> TrialPoint:
        """Evaluate at `step`."""
        if self._last.f <= self._best.f:
            self._last, self._best = self._best, self._last
        point, self.last_step = self._last, step
        point.f = math.inf  # in case the evaluation raises
        self.place(step, point.x)
        self._function.at(point)
        slope = self.slope(point) if math.isfinite(point.f) else math.nan
        if not math.isfinite(slope):
            point.f = math.inf
            self._function.not_finite += 1
        sample = TrialPoint(step, point.f, slope)
        self.samples.append(sample)
        return sample

    @property
    def most(self) -> float:
        """The largest step that a search may try."""
        return math.inf

    def place(self, step: float, x: torch.Tensor) -> None:
        """Write the point at `step` to `x`."""
        add(self.start.x, self.direction, step, out=x)

    def slope(self, point: Point) -> float:
        """Return the slope of phi at a point of the line."""
        return dot(point.gradient, self.direction)

    def take(self, found: TrialPoint | None) -> tuple[Point, list[Point]]:
        """Return the point that a search found, or the best one, which may be `start`, and the memory of the others."""
        points = [self.start, self._best, self._last]
        if found is not None and found.step == self.last_step:
            taken = self._last
        else:
            taken = min(points, key=lambda point: point.f)
        return taken, [point for point in points if point is not taken]
