"""Line searches on functions of one variable."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from batchopt.optim.linesearch import TrialPoint, armijo, strong_wolfe

Curve = Callable[[float], tuple[float, float]]


def power(t: float) -> tuple[float, float]:
    """The first test function of More and Thuente."""
    beta = 2.0
    return -t / (t * t + beta), (t * t - beta) / (t * t + beta) ** 2


def quintic(t: float) -> tuple[float, float]:
    """The second one."""
    beta = 0.004
    return (t + beta) ** 5 - 2 * (t + beta) ** 4, 5 * (t + beta) ** 4 - 8 * (t + beta) ** 3


def yanai(one: float, other: float) -> Curve:
    """The fourth to sixth: nearly flat, and steep at the ends."""

    def gamma(beta: float) -> float:
        return math.sqrt(1 + beta * beta) - beta

    def curve(t: float) -> tuple[float, float]:
        left, right = math.hypot(1 - t, other), math.hypot(t, one)
        f = gamma(one) * left + gamma(other) * right
        return f, -gamma(one) * (1 - t) / left + gamma(other) * t / right

    return curve


CURVES: dict[str, Curve] = {
    "power": power,
    "quintic": quintic,
    "yanai 4": yanai(0.001, 0.001),
    "yanai 5": yanai(0.01, 0.001),
    "yanai 6": yanai(0.001, 0.01),
    "parabola": lambda t: ((t - 3) ** 2, 2 * (t - 3)),
    "quartic": lambda t: ((t - 1) ** 4, 4 * (t - 1) ** 3),
    "exponential": lambda t: (math.exp(t) - 10 * t, math.exp(t) - 10),
}


class Phi:
    """Counts, and keeps what was asked for."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.samples: list[TrialPoint] = []

    def __call__(self, step: float) -> TrialPoint:
        try:
            sample = TrialPoint(step, *self.curve(step))
        except (OverflowError, ValueError, ZeroDivisionError):
            sample = TrialPoint(step, math.inf, math.nan)
        self.samples.append(sample)
        return sample

    @property
    def start(self) -> TrialPoint:
        return TrialPoint(0.0, *self.curve(0.0))


@pytest.mark.parametrize("first", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("flat", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("name", CURVES)
def test_the_strong_wolfe_conditions_hold(name: str, flat: float, first: float) -> None:
    phi = Phi(CURVES[name])
    found = strong_wolfe(phi, phi.start, first, 40, flat=flat)
    assert found is not None
    assert found in phi.samples
    assert found.f <= phi.start.f + 1e-4 * found.step * phi.start.slope
    assert abs(found.slope) <= flat * abs(phi.start.slope)


def test_a_wall_is_not_run_into_twice() -> None:
    phi = Phi(lambda t: (-math.log(2 - t) + (t - 1.9) ** 2, 1 / (2 - t) + 2 * (t - 1.9)))
    found = strong_wolfe(phi, phi.start, 1e3, 40, flat=0.1)
    assert found is not None and found.f < phi.start.f
    assert abs(found.slope) <= 0.1 * abs(phi.start.slope)
    walls = [sample.step for sample in phi.samples if not sample.finite]
    assert walls == sorted(set(walls), reverse=True)


def test_where_f_has_no_more_digits_slopes_decide() -> None:
    def curve(t: float) -> tuple[float, float]:
        return 1e8 + round(1e-9 * (t - 1) ** 2 * 1e8) / 1e8, 2e-9 * (t - 1)

    phi = Phi(curve)
    found = strong_wolfe(phi, phi.start, 0.01, 40, noise=1e-7, flat=0.1)
    assert found is not None
    assert abs(found.step - 1) < 0.5


def test_nothing_is_found_where_the_slope_is_not_that_of_f_and_noise_is_no_excuse_for_a_higher_one() -> None:
    for search in (strong_wolfe, armijo):
        phi = Phi(lambda t: (1.0 + t, -1.0))
        assert search(phi, phi.start, 1.0, 20) is None
        assert len(phi.samples) <= 20
    phi = Phi(lambda t: (1.0 + 1e-3 * t, -1.0))
    assert strong_wolfe(phi, phi.start, 1.0, 10, noise=1e-6) is None


@pytest.mark.parametrize("name", CURVES)
def test_armijo_goes_back_until_f_is_low_enough(name: str) -> None:
    phi = Phi(CURVES[name])
    found = armijo(phi, phi.start, 100.0, 60)
    assert found is not None and found is phi.samples[-1]
    assert found.f <= phi.start.f + 1e-4 * found.step * phi.start.slope
    for one, other in zip(phi.samples, phi.samples[1:], strict=False):
        assert other.step <= 0.5 * one.step
