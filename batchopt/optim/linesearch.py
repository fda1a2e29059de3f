"""Line searches: how far to go along a direction. Decisions only; the caller evaluates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class TrialPoint(NamedTuple):
    """phi and its slope at a step along a line; the slope may be NaN if unknown."""

    step: float
    f: float
    slope: float

    @property
    def finite(self) -> bool:
        """Tell whether both are finite."""
        return math.isfinite(self.f) and math.isfinite(self.slope)


Phi = Callable[[float], TrialPoint]

# Sufficient fraction of the decrease that the slope promises; fraction of the slope that counts as flat.
C1, C2 = 1e-4, 0.9
# C1 of the approximate conditions (delta of Hager and Zhang).
APPROXIMATE = 0.1
# Fraction of the way to a point where f is not finite that is tried next.
BACKTRACK = 0.25
# Least and greatest extension of a step, relative to the last one, while the slope is downhill.
GROW_LEAST, GROW_MOST = 1.1, 4.0
# A bracket larger than this fraction of the one before the last is halved.
SHRINKS = 0.66
# A bracket smaller than this fraction of its end counts as a point.
NARROW = 1e-10


class Accept(NamedTuple):
    """The strong Wolfe conditions; or, if the difference of f is below `noise` and thus meaningless, the approximate
    ones of Hager and Zhang, "A new conjugate gradient method with guaranteed descent and an efficient line search",
    SIAM Journal on Optimization 16, 2005, equation 4.1."""

    start: TrialPoint
    flat: float
    noise: float

    def is_lower(self, trial: TrialPoint) -> bool:
        """Tell whether f has decreased sufficiently."""
        return trial.f <= self.start.f + C1 * trial.step * self.start.slope

    def __call__(self, trial: TrialPoint) -> bool:
        """Tell whether to stop at this trial."""
        slope = self.start.slope
        if self.is_lower(trial):
            return abs(trial.slope) <= -self.flat * slope
        near = abs(trial.f - self.start.f) <= self.noise
        return near and self.flat * slope <= trial.slope <= (2 * APPROXIMATE - 1) * slope


def strong_wolfe(
    phi: Phi,
    start: TrialPoint,
    first: float,
    evaluations: int,
    noise: float = 0.0,
    flat: float = C2,
    most: float = math.inf,
) -> TrialPoint | None:
    """Return a step that satisfies the strong Wolfe conditions, tried from `first` on, by the bracketing and
    interpolation of More and Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM TOMS 20, 1994.

    Differences of f up to `noise` are ignored: then slopes alone decide. The search does not go beyond a trial that is
    not finite, nor beyond `most`, where a sufficient decrease is enough. Once `evaluations` are spent, or the bracket
    is a point, returns the best trial if it is lower than `start`, else None.
    """
    accept = Accept(start, flat, noise)
    low, high = start, None  # the best end so far; the other end, once a minimum lies between
    wall, step = math.inf, first
    widths = (math.inf, math.inf)
    for _ in range(evaluations):
        trial = phi(step)
        if trial.finite and (accept(trial) or (step >= most and trial.slope < 0 and accept.is_lower(trial))):
            return trial
        if not trial.finite:
            wall, step = step, low.step + BACKTRACK * (step - low.step)
            continue
        if low.f < trial.f <= low.f + noise:
            trial = trial._replace(f=low.f)
        step = min(_next(low, high, trial, wall), most)
        low, high = _bracket(low, high, trial)
        if step in (low.step, trial.step) or not 0 < step < math.inf:
            break  # no floating-point number lies between
        if high is None:
            continue
        width = abs(high.step - low.step)
        if width <= NARROW * max(high.step, low.step):
            break
        if width >= SHRINKS * widths[0]:
            step = 0.5 * (low.step + high.step)
        widths = widths[1], width
    return low if low.f < start.f else None


def _bracket(low: TrialPoint, high: TrialPoint | None, trial: TrialPoint) -> tuple[TrialPoint, TrialPoint | None]:
    """Return the best end of the interval that holds a minimum, given `trial`, and the other end."""
    if trial.f > low.f:
        return low, trial
    return trial, (low if _opposite(low, trial) else high)


def _opposite(one: TrialPoint, other: TrialPoint) -> bool:
    return (one.slope < 0) != (other.slope < 0)


def _next(low: TrialPoint, high: TrialPoint | None, trial: TrialPoint, wall: float) -> float:
    """Return the step to try after `trial`: the four cases of More and Thuente, section 4."""
    cubic, secant = _cubic(low, trial), _secant(low, trial)
    if trial.f > low.f:
        quadratic = _quadratic(low, trial)
        if cubic is None:
            return quadratic
        return cubic if abs(cubic - low.step) < abs(quadratic - low.step) else 0.5 * (cubic + quadratic)
    if _opposite(low, trial):
        return secant if cubic is None or abs(secant - trial.step) > abs(cubic - trial.step) else cubic
    flatter = abs(trial.slope) < abs(low.slope)
    if high is None:
        ahead = trial.step - low.step
        least, most = trial.step + GROW_LEAST * ahead, trial.step + GROW_MOST * ahead
        if wall < math.inf:
            least, most = trial.step, min(most, 0.5 * (trial.step + wall))
        beyond = [step for step in (cubic, secant) if step is not None and step > trial.step] if flatter else []
        return min(most, max(least, *beyond)) if beyond else most
    if not flatter:
        other = _cubic(high, trial)
        return 0.5 * (trial.step + high.step) if other is None else other
    inside = trial.step + SHRINKS * (high.step - trial.step)
    towards = [step for step in (cubic, secant) if step is not None and _between(step, trial.step, inside)]
    return min(towards, key=lambda step: abs(step - trial.step)) if towards else inside


def _between(step: float, one: float, other: float) -> bool:
    return min(one, other) < step < max(one, other)


def _secant(one: TrialPoint, other: TrialPoint) -> float:
    """Return the step where the slope would vanish if it were linear."""
    change = other.slope - one.slope
    return other.step - other.slope * (other.step - one.step) / change if change else math.inf


def _quadratic(one: TrialPoint, other: TrialPoint) -> float:
    """Return the minimum of the parabola through both values and the slope of `one`."""
    length = other.step - one.step
    bend = other.f - one.f - one.slope * length
    return one.step - 0.5 * one.slope * length * length / bend if bend else one.step + 0.5 * length


def _cubic(one: TrialPoint, other: TrialPoint) -> float | None:
    """Return the minimum of the cubic through both values and slopes; None if it has none."""
    length = other.step - one.step
    middle = one.slope + other.slope - 3 * (other.f - one.f) / length
    scale = max(abs(middle), abs(one.slope), abs(other.slope))
    if not 0 < scale < math.inf:
        return None
    inner = (middle / scale) ** 2 - one.slope / scale * (other.slope / scale)
    if inner < 0:
        return None
    root = math.copysign(scale * math.sqrt(inner), length)
    below = other.slope - one.slope + 2 * root
    return other.step - length * (other.slope + root - middle) / below if below else None


def discrepancy(start: TrialPoint, trial: TrialPoint) -> float:
    """Return how far the change of f is from that implied by the two slopes, if they are about equal; else 0, as it may
    be curvature."""
    if not trial.finite or abs(trial.slope - start.slope) > 0.5 * abs(start.slope):
        return 0.0
    return abs(trial.f - start.f - 0.5 * trial.step * (start.slope + trial.slope))


def armijo(phi: Phi, start: TrialPoint, first: float, evaluations: int) -> TrialPoint | None:
    """Return the first step, backtracking from `first`, that decreases f by a fraction of what the slope promises
    (Armijo 1966), or None if there is none within `evaluations`. Each step is the minimum of a parabola through the one
    before, but at least a tenth of it and at most half."""
    step = first
    for _ in range(evaluations):
        trial = phi(step)
        if trial.f <= start.f + C1 * step * start.slope and trial.finite:
            return trial
        shorter = _quadratic(start, trial) if math.isfinite(trial.f) else BACKTRACK * step
        step = min(max(shorter, 0.1 * step), 0.5 * step)
    return None


def fixed(phi: Phi, start: TrialPoint, first: float, evaluations: int) -> TrialPoint | None:
    """Return `first`, or the first finite trial among steps each a quarter of the one before; None if there is none."""
    for i in range(evaluations):
        trial = phi(first * BACKTRACK**i)
        if trial.finite:
            return trial
    return None
