"""The base class of the line-search optimizers: choose a direction, and search along it."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from batchopt.optim.algebra import add, dot, largest, norm
from batchopt.optim.line import Line, Point
from batchopt.optim.linesearch import C2, TrialPoint, armijo, discrepancy, fixed, strong_wolfe
from batchopt.optim.minimizer import Minimizer, Search, limit

# Evaluations that one line search may take.
SEARCH = 30
# The first step along the steepest descent changes the largest parameter by about this part of it: the psi of Hager and
# Zhang, who take 0.01, with which more evaluations are needed.
FIRST = 0.15
# More than this part of f is not believed to be noise.
NOISIEST = 1e-2


class Descent(Minimizer):
    """Steps along descent directions with a line search; a subclass says which directions."""

    flat = C2  # how much flatter phi has to be where a line search ends

    def _make_room(self) -> None:
        super()._make_room()
        self._direction = self._vector.empty()

    @abstractmethod
    def _aim(self, here: Point, out: torch.Tensor) -> None:
        """Write the direction to go to `out`."""

    @abstractmethod
    def _learn(self, before: Point, after: Point, change: torch.Tensor) -> None:
        """A step was made, by which the parameters changed by `change`."""

    @abstractmethod
    def _first(self, slope: float) -> float | None:
        """Where a line search begins along the direction, by the slope there; None: along the steepest descent, of
        which nothing is known."""

    def _steepest_first(self, here: Point) -> float:
        """Where one begins along the steepest descent: Hager and Zhang 2005, section 4 (I0). Whatever the units of f
        and of the parameters are, it is the same point. Without a line search at most 1, and at most a length of 1."""
        direction = self._direction
        if self._line_search is None:
            return min(1.0, 1.0 / norm(direction))
        if (size := largest(here.x)) > 0:
            return FIRST * size / largest(direction)
        return FIRST * abs(here.f) / dot(direction, direction) if here.f else 1.0

    def _line(self, run: Search) -> Line:
        return Line(run.function, run.here, self._direction, run.spare)

    @property
    def _line_search(self) -> str | None:
        kind: str | None = self._group["line_search_fn"]
        return kind

    def _stays(self, run: Search) -> bool:
        return self._line_search is not None and super()._stays(run)

    def _advance(self, run: Search) -> float | None:
        """Search along the next direction, and go to what was found; returns the step, or None if nothing was."""
        here, direction = run.here, self._direction
        line = self._line(run)
        self._aim(here, direction)
        slope = line.slope(here)
        if not slope < 0 and self._drop(run, f"the direction of iteration {run.iterations + 1} was not downhill"):
            self._aim(here, direction)
            slope = line.slope(here)
        if not -math.inf < slope < 0:
            return None
        start = TrialPoint(0.0, here.f, slope)
        run.line = line
        found = self._search(run, line, start)
        if found is None and self._learn_noise(run, start, line.samples):
            found = self._search(run, line, start)
        run.line = None
        after, spare = line.take(found)
        change = 0.0 if after is here else norm(add(after.x, here.x, -1.0, out=self._change))
        if change == 0:
            return None
        run.change, run.here, run.spare = change, after, spare
        self._keep_lowest(run, here)
        if self._memory.get("on_trial", False):
            self._judge(run, self._curvature_ratio(here, after, slope))
        self._learn(here, after, self._change)
        return line.last_step if found is None else found.step

    def _curvature_ratio(self, before: Point, after: Point, slope: float) -> float:
        """The curvature of f along the last step by that of which the direction was made: y's / s'Bs, where s is t
        times the direction, the slope along that being minus its curvature."""
        change = self._change
        t = dot(change, change) / dot(change, self._direction)
        return (dot(change, after.gradient) - dot(change, before.gradient)) / (-slope * t**2)

    def _search(self, run: Search, line: Line, start: TrialPoint) -> TrialPoint | None:
        group, kind = self._group, self._line_search
        first = self._first(start.slope)
        first = group["lr"] * (self._steepest_first(run.here) if first is None else first)
        if not 0 < first < math.inf:  # what it was made of is as small as numbers get
            first = group["lr"]
        evaluations = int(min(SEARCH, limit(group["max_eval"]) - run.function.evaluations))
        if kind is None:
            return fixed(line, start, first, evaluations)
        if kind == "armijo":
            return armijo(line, start, first, evaluations)
        noise = max(run.noise, self._rounding(run))
        return strong_wolfe(line, start, first, evaluations, max(noise - (start.f - run.best), 0.0), self.flat)

    def _learn_noise(self, run: Search, start: TrialPoint, samples: list[TrialPoint]) -> bool:
        """After a search in vain: what f differs by from what the slopes say, where they say the same at both ends.
        Returns whether that is more than was thought of as noise."""
        if self._line_search != "strong_wolfe":
            return False
        noise = 2 * max((discrepancy(start, sample) for sample in samples), default=0.0)
        if not max(run.noise, self._rounding(run)) < noise <= NOISIEST * abs(run.best):
            return False
        run.noise = noise
        return True
