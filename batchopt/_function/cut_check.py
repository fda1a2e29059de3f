"""Checks, once and on a few samples, that the loss of a batch is the mean (or the sum) of the losses of its parts.

A loss function of the user's own may be the mean of something else than samples (tokens that are no padding, atoms,
pixels in a mask): cut into chunks, it is another function. Nobody can read that in it; so a few samples are evaluated
in one go, and in two parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import torch

from batchopt._data.batches import Reading, Readings
from batchopt._data.denominators import is_torchs_own
from batchopt._mapreduce.reduce import merge_answers
from batchopt.backends.base import Backend
from batchopt.errors import WorkerError, WorkerLostError
from batchopt_workers.batch import Batch, Columns, Part
from batchopt_workers.inspection import counts_frequencies, name_of
from batchopt_workers.messages import Cut, Order

# Samples that are evaluated, of each term.
SAMPLES = 8
# Of the parts' magnitude: what the precision of the parameters, or of a solver inside, leaves uncertain.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-4}
COARSE = 5e-2


# Of a loss that draws random numbers: how often it is drawn; how many standard errors, and which part of it, are no
# chance; and the standard errors up to which that part would have been seen.
DRAWS, CERTAIN, LEAST, SEEN = 8, 6.0, 0.1, 4.0


@dataclass(frozen=True)
class Difference:
    """A term (None where there are no terms) whose loss of `samples` samples is `whole`, and `parted` where they are
    cut into two parts of so many. `decided`: whether that is no chance of random draws."""

    term: str | None
    reduction: str
    parts: tuple[int, int]
    whole: float
    parted: float
    decided: bool = True

    def __str__(self) -> str:
        of_term = "" if self.term is None else f" of term {self.term!r}"
        one, two = self.parts
        return (
            f"the loss{of_term} of {one + two} samples is {self.whole:.9g} in one forward, and {self.parted:.9g} as "
            f"the {self.reduction} over {one} and {two} of them"
        )


class Drawn(NamedTuple):
    """The loss of some samples, and those of its two parts, all with the same random draws."""

    whole: float
    one: float
    two: float

    @property
    def off(self) -> float:
        """How far the sum of the parts is off."""
        return self.one + self.two - self.whole

    @property
    def scale(self) -> float:
        """The parts' magnitude, or that of the whole."""
        return max(abs(self.whole), abs(self.one) + abs(self.two))


def differs(drawn: Drawn, tolerance: float) -> bool:
    """Whether the whole is not the sum of its parts; False where nothing can be said."""
    return math.isfinite(drawn.off) and abs(drawn.off) > tolerance * drawn.scale


def judge(draws: Sequence[Drawn]) -> bool | None:
    """Whether a loss that is random is not the sum of its parts; None where that cannot be told."""
    off = [drawn.off for drawn in draws]
    error = stdev(off) / math.sqrt(len(draws))
    least = LEAST * fmean(drawn.scale for drawn in draws)
    if abs(fmean(off)) > max(CERTAIN * error, least):
        return True
    return False if SEEN * error < least else None


def split(samples: int, largest: int) -> tuple[int, int]:
    """How many samples to evaluate, in two unequal parts if there are enough of them: no more at a time than the
    `largest` chunk has, where that has two."""
    count = min(SAMPLES, samples, max(largest, 2))
    one = max(count * 3 // 8, 1)
    return one, count - one


def compare(
    backend: Backend,
    batch: Batch,
    readings: Readings,
    largest: int,
    number: Callable[[], int],
    step: int,
    dtype: torch.dtype,
) -> list[Difference]:
    """The terms of the loaded batch whose loss depends on the cut, as far as the first samples of each can tell.

    Evaluates them on one worker, without hooks (which the caller has taken off): in one go, and in two parts, with the
    same random draws. Where that differs and the loss is random, several draws decide; or do not, as where a few
    samples cannot be evaluated. Nothing is said of what is not finite, nor of torch's own criteria. `number` numbers
    the evaluations.
    """
    tolerance, found = TOLERANCES.get(dtype, COARSE), []
    for term, part in enumerate(batch.parts):
        if part.size < 2 or not _is_asked(part, readings[part.name]):
            continue
        first = batch.numbering.position(term, range(1)).start
        one, two = split(part.size, largest)

        def value(start: int, stop: int, step: int, term: int = term) -> float:
            order = Order(number(), step, 0, 1)  # the first chunk, always: its draws
            cut = Cut((start, stop))
            answers = backend.evaluate(cut, [order] + [None] * (len(backend.workers) - 1))
            return sum(partial.losses[term] for _, partial in merge_answers(answers, cut.chunks))

        try:
            verdict, draws = _draw(value, (first, first + one, first + one + two), step, tolerance)
        except (WorkerError, WorkerLostError):  # the module cannot evaluate so few samples, or needs the hooks
            verdict, draws = None, [Drawn(math.nan, math.nan, math.nan)]
        if verdict is not False:
            weight = part.weighting.of(0, one + two)
            whole, parted = fmean(d.whole for d in draws) / weight, fmean(d.one + d.two for d in draws) / weight
            reduction, decided = part.weighting.reduction, verdict is not None
            found.append(Difference(part.name, reduction, (one, two), whole, parted, decided))
    return found


def _draw(
    value: Callable[[int, int, int], float], bounds: tuple[int, int, int], step: int, tolerance: float
) -> tuple[bool | None, list[Drawn]]:
    """Whether the loss of two parts is not that of the whole, None where nobody can tell; and the losses. `value` is
    that of the samples from one up to another, with the draws of a step."""
    first, middle, last = bounds
    found: list[Drawn] = []

    def draw() -> Drawn:
        s = step + len(found)
        found.append(Drawn(value(first, last, s), value(first, middle, s), value(middle, last, s)))
        return found[-1]

    if not differs(draw(), tolerance):
        return False, found
    if not differs(Drawn(found[0].whole, value(first, last, step + 1), 0.0), tolerance):
        return True, found
    while len(found) < DRAWS:
        draw()
    return judge(found), found


def _is_asked(part: Part, reading: Reading) -> bool:
    """Whether the loss of several samples is one forward, and the user's own, or of what the user has collated."""
    if not isinstance(part.inputs, Columns) and part.collate is None:
        return False
    criterion = reading.criterion
    is_known = is_torchs_own(criterion) and not criterion._forward_hooks and not criterion._forward_pre_hooks
    return not is_known or reading.denominators is not None or reading.collate is not None


def refuse_frequencies(
    module: torch.nn.Module, workers: int | None, batch: Batch | None = None, chunks: int = 1
) -> None:
    """Raise `ValueError` for a layer whose gradient counts how often an entry is in a forward, where the batch takes
    more than one."""
    forwards = chunks
    if batch is not None and not batch.is_of_columns:
        forwards = max(chunks, _forwards(batch) - len(batch.parts) + 1)
    part = None if workers == 1 and forwards == 1 else counts_frequencies(module)
    if part is not None:
        raise ValueError(
            f"'{name_of(part, module)}' ({type(part).__name__}) has scale_grad_by_freq: it divides gradients by how "
            "often an entry is in a forward, which has a chunk of the batch; use parallelize=1 without chunk_size "
            "(and with collate_fn for a list of samples), or scale_grad_by_freq=False"
        )


def _forwards(batch: Batch) -> int:
    """How many forwards the batch takes if it is not cut."""
    listed = [not isinstance(part.inputs, Columns) and part.collate is None for part in batch.parts]
    return sum(part.size if one_each else 1 for part, one_each in zip(batch.parts, listed, strict=True))
