"""The outcome of an optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """The reason why a step of an optimizer ended; the value describes it."""

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
    """The outcome of a step: the reason why it ended, `iterations` and `evaluations` of this step, f and the largest
    absolute element of its gradient at the final parameters, and the length (Euclidean) of the last change of the
    parameters.

    `number` says which of these evaluations, from 1 on, was at the final parameters. `not_finite` counts the trials
    where f or its gradient was infinite or NaN, each of which shortened a step. `forgotten` has an entry, with the
    reason, for each time that the known curvature was dropped. `kept`: the function had changed, and the known
    curvature fitted it well enough to be kept (`when_data_change="keep"`).
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
