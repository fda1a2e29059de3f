"""The interface of what follows evaluations: the reporter, a timeline, the trials of a step, the prefetching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batchopt._mapreduce.answers import Answer


class Evaluated(NamedTuple):
    """A finished evaluation.

    The `number`-th of all, on the `batch`-th batch, found `loss` (f) and that of each term by name. The map took from
    `began` to `mapped`, the reduce from there to `ended` (`time.perf_counter`); the workers gave `answers`, of a batch
    that was cut at `bounds`.
    """

    number: int
    batch: int
    loss: float
    terms: Mapping[str, float]
    answers: Sequence[Answer]
    bounds: Sequence[int]
    began: float
    mapped: float
    ended: float


class Observer:
    """Follows evaluations: a subclass overrides the events that it needs. `looks`: whether at the workers' answers."""

    looks = False

    def begins(self) -> None:
        """An evaluation begins."""

    def busy(self) -> None:
        """The workers compute: this process has time to do something."""

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation is over."""

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Workers have done a task of that name on a batch that was cut at `bounds`."""
