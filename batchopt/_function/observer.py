"""The interface of what follows evaluations, and the trials of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

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


# Words of 8 bytes that are summed at a time: they, and what becomes of them, stay in the processor's cache.
BLOCK = 2**14
_ODD = np.random.default_rng(0).integers(2**63, size=BLOCK, dtype=np.uint64) * 2 + 1
_NEXT = 0x9E3779B97F4A7C15
_version = attrgetter("_version")


def checksum(x: torch.Tensor) -> int:
    """64 bits that say whether two vectors (1-D) are the same, bit for bit; by NumPy, which leaves no thread
    spinning."""
    octets = x.detach().cpu().view(torch.uint8).numpy()
    whole = len(octets) // 8 * 8
    words, rest = octets[:whole].view(np.uint64), octets[whole:]
    total = int.from_bytes(rest.tobytes(), "little")
    for start in range(0, len(words), BLOCK):
        # a plain sum would not see that one element grows by what another one loses
        mixed = words[start : start + BLOCK] * _ODD[: len(words) - start]
        mixed ^= mixed >> 32
        total = (total * _NEXT + int(mixed.sum())) % 2**64
    return total


class Trial(NamedTuple):
    """f and the losses of the terms at a point of that `checksum`; None: at the start of the step."""

    checksum: int | None
    loss: float
    terms: Mapping[str, float]


class Trials:
    """The evaluations of one step; which one is of the parameters that are left, the optimizer says, or a checksum of
    X. A step that evaluates once costs nothing."""

    def __init__(self, x: torch.Tensor, parameters: Sequence[torch.Tensor], told: bool) -> None:
        """`x`: the vector of the `parameters`, at the start of the step. `told`: the optimizer will say."""
        self._x, self._told = x, told
        self._written_through = x, *parameters
        self._start = [] if told else [*map(_version, self._written_through)]
        self._trials: list[Trial | None] = []  # None: one that raised
        self._here: int | None = None

    def begins(self) -> None:
        """An evaluation begins."""
        self._here = None
        self._trials.append(None)

    def busy(self) -> None:
        """Note where X is; in time that costs nothing, while the workers compute."""
        if self._told or self._here is not None:
            return
        if len(self._trials) > 1 or [*map(_version, self._written_through)] != self._start:
            self._here = checksum(self._x)

    def evaluated(self, found: Evaluated) -> None:
        """Keep what was found."""
        if self._here is None:
            self.busy()
        self._trials[-1] = Trial(self._here, found.loss, found.terms)

    def number(self, of_last: int, last: int) -> Trial | None:
        """The evaluation that is number `of_last` of the `last` ones, from 1 on."""
        return self._trials[len(self._trials) - last + of_last - 1]

    def left(self, start: torch.Tensor) -> Trial | None:
        """The evaluation of X as it is now, where there were several and one was there; `start`: X when the step
        began."""
        if len(self._trials) < 2:
            return None
        trials = [trial for trial in self._trials if trial is not None]
        if len(trials) < 2:
            return None
        here, first = checksum(self._x), trials[0]
        found = next((trial for trial in reversed(trials) if trial.checksum == here), None)
        if found is None and first.checksum is None and checksum(start) == here:
            found = first
        return found
