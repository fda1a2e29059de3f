"""How an optimizer's step went, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """Why a step of an optimizer ended; the value says it in words."""

    GRADIENT = "converged: no element of the gradient is larger than tolerance_grad"
    CHANGE = "converged: f, or every parameter, changed by no more than tolerance_change"
    ITERATIONS = "max_iter iterations were made"
    EVALUATIONS = "max_eval evaluations were made"
    CALLBACK = "the callback said so"
    NO_DECREASE = (
        "no lower point was found, along the steepest descent either: f has no more digits to lose here (float64 has "
        "more), or the gradient is not that of f"
    )
    NOT_FINITE = "f or its gradient is not finite at the start"


@dataclass(frozen=True)
class Result:
    """The outcome of a step: why it ended, `iterations` and `evaluations` of this step, f and the largest absolute
    element of its gradient at the parameters that it left, and the length (Euclidean) of the last change of the
    parameters.

    `number` says which of these evaluations, from 1 on, was of the parameters that it left. `not_finite` counts the
    trials where f or its gradient was infinite or NaN, which made a step shorter. `forgotten` names each time that what
    was known of the function's curvature was dropped, and why. `kept`: whether the function had changed, and what was
    known fitted it well enough to be kept (`when_data_change="keep"`).
    """

    status: Status
    iterations: int
    evaluations: int
    f: float
    gradient: float
    change: float
    number: int
    not_finite: int = 0
    forgotten: tuple[str, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class Iteration:
    """An accepted point, for `callback`: its number (from 1 on, over all steps), evaluations so far (over all steps),
    f, the largest absolute element of its gradient, the step along the direction, and the Euclidean length of the
    change."""

    number: int
    evaluations: int
    f: float
    gradient: float
    step: float
    change: float
