"""The interface of observers of evaluations, and the trials of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

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
    """Follows evaluations by overriding events. `looks`: whether it uses the workers' answers."""

    looks = False

    def begins(self) -> None:
        """Handle the beginning of an evaluation."""

    def busy(self) -> None:
        """Use the time while the workers compute."""

    def evaluated(self, found: Evaluated) -> None:
        """Handle the end of an evaluation."""

    def step_begins(self) -> None:
        """Handle the beginning of an optimizer's step."""

    def accepted(self, step: int, point: Iteration) -> None:
        """Handle a point that an optimizer of batchopt has accepted in the `step`-th step."""

    def step_ended(self, found: Stepped | None) -> None:
        """Handle the end of a step; None: it was undone, as after an exception."""

    def did(self, name: str, began: float) -> None:
        """Handle a finished piece of work in this process, which began at that `time.perf_counter`."""

    def decided(self, message: str) -> None:
        """Handle a decision about the way in which evaluations are made, in words."""

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Handle a finished task of that name on a batch that is cut at `bounds`."""


# Words of 8 bytes that are summed at a time: they and the intermediate results stay in the processor's cache.
BLOCK = 2**14
_ODD = np.random.default_rng(0).integers(2**63, size=BLOCK, dtype=np.uint64) * 2 + 1
_NEXT = 0x9E3779B97F4A7C15
_version = attrgetter("_version")


def checksum(x: torch.Tensor) -> int:
    """Return 64 bits that identify a vector (1-D) bit for bit; computed by NumPy, which leaves no thread spinning."""
    octets = x.detach().cpu().view(torch.uint8).numpy()
    whole = len(octets) // 8 * 8
    words, rest = octets[:whole].view(np.uint64), octets[whole:]
    total = int.from_bytes(rest.tobytes(), "little")
    for start in range(0, len(words), BLOCK):
        # a plain sum would miss changes that cancel out
        mixed = words[start : start + BLOCK] * _ODD[: len(words) - start]
        mixed ^= mixed >> 32
        total = (total * _NEXT + int(mixed.sum())) % 2**64
    return total


class Trial(NamedTuple):
    """f and the losses of the terms at a point with that `checksum`; None: at the start of the step."""

    checksum: int | None
    loss: float
    terms: Mapping[str, float]


class Trials:
    """The evaluations of one step. The one at the final parameters is identified by the optimizer or by a checksum of
    X. A step with one evaluation needs no checksum."""

    def __init__(self, x: torch.Tensor, parameters: Sequence[torch.Tensor], reported: bool) -> None:
        """Start a step: `x` is the vector of `parameters`. `reported`: the optimizer names the final evaluation."""
        self._x, self._reported = x, reported
        self._written_through = x, *parameters
        self._start = [] if reported else [*map(_version, self._written_through)]
        self._trials: list[Trial | None] = []  # None: one that raised
        self._here: int | None = None

    def begins(self) -> None:
        """Add an evaluation, without a result so far."""
        self._here = None
        self._trials.append(None)

    def busy(self) -> None:
        """Identify the current X, while the workers compute and the time is free."""
        if self._reported or self._here is not None:
            return
        if len(self._trials) > 1 or [*map(_version, self._written_through)] != self._start:
            self._here = checksum(self._x)

    def evaluated(self, loss: float, terms: Mapping[str, float]) -> None:
        """Keep the result."""
        if self._here is None:
            self.busy()
        self._trials[-1] = Trial(self._here, loss, terms)

    def number(self, of_last: int, last: int) -> Trial | None:
        """Return the evaluation with number `of_last` among the `last` ones, from 1 on."""
        return self._trials[len(self._trials) - last + of_last - 1]

    def left(self, start: torch.Tensor) -> Trial | None:
        """Return the evaluation at the current X, if it was one of several; `start`: X when the step began."""
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
