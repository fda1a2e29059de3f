"""The base class of the line-search optimizers: choose a direction, and search along it."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from batchopt.optim.algebra import add, dot, dots, largest, norm
from batchopt.optim.line import Line, Point
from batchopt.optim.linesearch import C2, TrialPoint, armijo, discrepancy, fixed, strong_wolfe
from batchopt.optim.minimizer import Minimizer, Search, limit

# Maximum number of evaluations in a line search.
SEARCH = 30
# The first step along the steepest descent changes the largest parameter by about this fraction: the psi of Hager and
# Zhang, who use 0.01. On the problems of S2MPJ, less needs more evaluations: 0.15 a tenth, 0.3 a twentieth.
FIRST = 0.5
# A larger fraction of f is not considered noise.
NOISIEST = 1e-2


class Descent(Minimizer):
    """Steps along descent directions with a line search; a subclass chooses the directions."""

    flat = C2  # the fraction of the slope of phi that may remain where a line search ends

    def _make_room(self) -> None:
        super()._make_room()
        self._direction = self._vector.empty()

    @abstractmethod
    def _aim(self, here: Point, out: torch.Tensor) -> None:
        """Write the next direction to `out`."""

    @abstractmethod
    def _learn(self, before: Point, after: Point, change: torch.Tensor) -> None:
        """Learn from a step, which changed the parameters by `change`."""

    @abstractmethod
    def _first(self, slope: float) -> float | None:
        """Return the first step that a line search tries, given the slope at its start; None: the steepest
        descent's."""

    def _steepest_first(self, here: Point) -> float:
        """Return the first step tried along the steepest descent: Hager and Zhang 2005, section 4 (I0), which is
        independent of the units of f and of the parameters. Without a line search at most 1, and a move by at most
        1."""
        direction = self._direction
        if self._line_search is None:
            return min(1.0, 1.0 / norm(direction))
        if (size := largest(here.x)) > 0:
            return FIRST * size / largest(direction)
        square = dot(direction, direction)  # which may underflow
        return FIRST * abs(here.f) / square if here.f and square else 1.0

    def _line(self, run: Search) -> Line:
        return Line(run.function, run.here, self._direction, run.spare)

    @property
    def _line_search(self) -> str | None:
        kind: str | None = self._group["line_search_fn"]
        return kind

    def _stays(self, run: Search) -> bool:
        return self._line_search is not None and super()._stays(run)

    def _advance(self, run: Search) -> float | None:
        """Search along the next direction and move to the point found; return the step, or None if there is none."""
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
        run.line, run.trials = None, tuple((sample.step, sample.f) for sample in line.samples)
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
        """Return the curvature of f along the last step divided by that of the model: y's / s'Bs, where s is t times
        the direction, and the slope along the direction is minus its curvature in the model."""
        change = self._change
        ss, along, end, begin = dots(
            (change, change), (change, self._direction), (change, after.gradient), (change, before.gradient)
        )
        return (end - begin) / (-slope * (ss / along) ** 2)

    def _search(self, run: Search, line: Line, start: TrialPoint) -> TrialPoint | None:
        group, kind = self._group, self._line_search
        first = self._first(start.slope)
        first = group["lr"] * (self._steepest_first(run.here) if first is None else first)
        if not 0 < first < math.inf:  # under- or overflow of its factors
            first = group["lr"]
        evaluations = int(min(SEARCH, limit(group["max_eval"]) - run.function.evaluations))
        if kind is None:
            return fixed(line, start, first, evaluations)
        if kind == "armijo":
            return armijo(line, start, first, evaluations)
        noise = max(run.noise, self._rounding(run))
        noise, most = max(noise - (start.f - run.best), 0.0), line.most
        return strong_wolfe(line, start, min(first, most), evaluations, noise, self.flat, most)

    def _learn_noise(self, run: Search, start: TrialPoint, samples: list[TrialPoint]) -> bool:
        """Estimate the noise of f after an unsuccessful search: its deviation from the slopes, where they are about
        equal at both ends. Return whether it exceeds the noise known so far."""
        if self._line_search != "strong_wolfe":
            return False
        noise = 2 * max((discrepancy(start, sample) for sample in samples), default=0.0)
        if not max(run.noise, self._rounding(run)) < noise <= NOISIEST * abs(run.best):
            return False
        run.noise = noise
        return True
