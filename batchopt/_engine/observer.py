"""The interface of observers, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batchopt._mapreduce.answers import Answer
from batchopt.optim.minimizer import Iteration


class Evaluated(NamedTuple):
    """A finished evaluation. It is the `number`-th of all, on the `batch`-th batch, which is cut at `bounds`; it found
    `loss` (f) and that of each term by name. The map ran from `began` to `mapped`, the reduce until `ended`
    (`time.perf_counter`). `answers` are the workers' answers."""

    number: int
    batch: int
    loss: float
    terms: Mapping[str, float]
    answers: Sequence[Answer]
    bounds: Sequence[int]
    began: float
    mapped: float
    ended: float


class Stepped(NamedTuple):
    """A step that has ended: the `batches` and `evaluations` so far, the `loss`, and whether its accepted points were
    told (`is_followed`)."""

    batches: int
    evaluations: int
    loss: float
    is_followed: bool


class Observer:
    """Follows evaluations by overriding events."""

    def begins(self) -> None:
        """Handle the beginning of an evaluation."""

    def busy(self) -> None:
        """Use the time while the workers compute."""

    def evaluated(self, found: Evaluated) -> None:
        """Handle the end of an evaluation."""

    def step_begins(self) -> None:
        """Handle the beginning of an optimizer's step."""

    def accepted(self, step: int, point: Iteration) -> None:
        """Handle a point that an optimizer of batchopt has accepted in the `step`-th step; the parameters are there."""

    def step_ended(self, found: Stepped | None) -> None:
        """Handle the end of a step; None: it was undone, as after an exception."""

    def did(self, name: str, began: float) -> None:
        """Handle a finished piece of work in this process, which began at that `time.perf_counter`."""

    def decided(self, message: str) -> None:
        """Handle a decision about the way in which evaluations are made, in words."""

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Handle a finished task of that name on a batch that is cut at `bounds`."""
