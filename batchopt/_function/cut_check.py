"""Checks, once and on a few samples, that the loss of a batch is the mean (or the sum) of the losses of its parts.

A loss function of the user's own may be the mean of something else than samples (tokens that are no padding, atoms,
pixels in a mask): cut into chunks, it is another function. Nobody can read that in it; so a few samples are evaluated
in one go, and in two parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Difference:
    """A term (None where there are no terms) whose loss of `samples` samples is `whole`, and `parted` where they are
    cut into two parts of so many."""

    term: str | None
    reduction: str
    parts: tuple[int, int]
    whole: float
    parted: float

    def __str__(self) -> str:
        of_term = "" if self.term is None else f" of term {self.term!r}"
        one, two = self.parts
        return (
            f"the loss{of_term} of {one + two} samples is {self.whole:.9g} in one forward, and {self.parted:.9g} as "
            f"the {self.reduction} over {one} and {two} of them"
        )


def differs(whole: float, one: float, two: float, tolerance: float) -> bool:
    """Whether `whole` is not the sum of its parts; False where nothing can be said."""
    off = abs(one + two - whole)
    return math.isfinite(off) and off > tolerance * max(abs(whole), abs(one) + abs(two))


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

    Evaluates them on one worker, without hooks (which the caller has taken off): in one go, in two parts, and, where
    that differs, with other draws. Nothing is said of a term that draws random numbers, raises, or is not finite, nor
    of torch's own criteria. `number` numbers the evaluations.
    """
    tolerance = TOLERANCES.get(dtype, COARSE)
    found = []
    for term, part in enumerate(batch.parts):
        if part.size < 2 or not _is_asked(part, readings[part.name]):
            continue
        first = batch.numbering.position(term, range(1)).start
        one, two = split(part.size, largest)

        def value(cut: Cut, chunk: int, step: int, term: int = term) -> float:
            order = Order(number(), step, chunk, chunk + 1)
            answers = backend.evaluate(cut, [order] + [None] * (len(backend.workers) - 1))
            return sum(partial.losses[term] for _, partial in merge_answers(answers, cut.chunks))

        at_once, parted = Cut((first, first + one + two)), Cut((first, first + one, first + one + two))
        try:
            whole = value(at_once, 0, step)
            parts = value(parted, 0, step), value(parted, 1, step)
            if not differs(whole, *parts, tolerance) or differs(whole, value(at_once, 0, step + 1), 0.0, tolerance):
                continue
        except (WorkerError, WorkerLostError):  # the module cannot evaluate so few samples, or needs the hooks
            continue
        weight = part.weighting.of(0, one + two)
        found.append(Difference(part.name, part.weighting.reduction, (one, two), whole / weight, sum(parts) / weight))
    return found


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
    terms = 1 if batch is None else len(batch.parts)
    forwards = chunks if batch is None else max(chunks, _forwards(batch) - terms + 1)
    if workers == 1 and forwards == 1:
        return
    for part in filter(counts_frequencies, module.modules()):
        raise ValueError(
            f"'{name_of(part, module)}' ({type(part).__name__}) has scale_grad_by_freq: it divides gradients by how "
            "often an entry is in a forward, which has a chunk of the batch; use parallelize=1 without chunk_size "
            "(and with collate_fn for a list of samples), or scale_grad_by_freq=False"
        )


def _forwards(batch: Batch) -> int:
    """How many forwards the batch takes if it is not cut."""
    listed = [not isinstance(part.inputs, Columns) and part.collate is None for part in batch.parts]
    return sum(part.size if one_each else 1 for part, one_each in zip(batch.parts, listed, strict=True))
