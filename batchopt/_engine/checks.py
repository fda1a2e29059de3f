"""Checks of a loss: dependence on how its batch is cut, and the origin of non-finite values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import NamedTuple

import torch

from batchopt._data.batches import BatchSpec
from batchopt._data.denominators import is_torchs_own
from batchopt._engine.evaluating import Evaluating
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.plan import runs, split_batch
from batchopt.backends.base import Backend
from batchopt.errors import NonFiniteError, WorkerError, WorkerLostError
from batchopt_workers.batch.batch import Batch, Columns, Part
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.functions.cut_losses import CutLosses, Rounding
from batchopt_workers.functions.task import PieceFunction, Task
from batchopt_workers.wire.orders import Cut, Kind, Order
from batchopt_workers.wire.structures import all_finite

# Tolerances relative to the parts' magnitude: rounding of the parameters' dtype, or of a solver inside the loss.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-4}
COARSE = 5e-2
# Errors by rounding up to which two losses are the same.
ERRORS = 8.0

# For a loss that draws random numbers: the number of draws; the standard errors, and the fraction of the loss, beyond
# which a difference is no chance; and the standard errors within which that fraction would have been detected.
DRAWS, CERTAIN, LEAST, SEEN = 8, 6.0, 0.1, 4.0


@dataclass(frozen=True)
class Difference:
    """A term (None without terms) whose loss of some samples is `whole` in one forward, and `parted` when they are cut
    into two parts of the sizes `parts`. `decided`: False if random draws might explain the difference."""

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
    """The loss of some samples and the losses of its two parts, all with the same random draws."""

    whole: float
    one: float
    two: float

    @property
    def off(self) -> float:
        """The sum of the parts minus the whole."""
        return self.one + self.two - self.whole

    @property
    def scale(self) -> float:
        """The magnitude of the parts, or that of the whole if it is larger."""
        return max(abs(self.whole), abs(self.one) + abs(self.two))


def differs(drawn: Drawn, tolerance: float) -> bool:
    """Tell whether the whole is not the sum of its parts; False where a value is not finite."""
    return math.isfinite(drawn.off) and abs(drawn.off) > tolerance * drawn.scale


def decide_random(draws: Sequence[Drawn]) -> bool | None:
    """Tell whether a random loss is not the sum of its parts; None if the draws cannot decide."""
    off = [drawn.off for drawn in draws]
    error = stdev(off) / math.sqrt(len(draws))
    least = LEAST * fmean(drawn.scale for drawn in draws)
    if abs(fmean(off)) > max(CERTAIN * error, least):
        return True
    return False if SEEN * error < least else None


def refuse_cut(engine: Evaluating, largest: int) -> None:
    """Raise `ValueError` if the loss of a few samples depends on how they are cut, into chunks of at most `largest`."""
    if found := [str(difference) for difference in cut_differences(engine, largest) if difference.decided]:
        raise ValueError(
            f"{'; '.join(found)}: f depends on how the batch is cut. If the loss is a mean over something else than "
            "samples (tokens, atoms, pixels), pass `denominators`, what each sample has of it; if it is a sum, "
            "reduction='sum'; if it is neither (pairs, ranks, a root), it cannot be cut: use parallelize=1 without "
            "`chunk_size`. `check()` says more; with check_cut=False f is the mean of the chunks"
        )


def cut_differences(engine: Evaluating, largest: int) -> list[Difference]:
    """Return the terms of the loaded batch whose loss depends on how it is cut, judged by some samples of each, as far
    as those of the `largest` chunk show.

    They are evaluated on one worker, without hooks: in one forward and in two parts, with the same random draws. If a
    random loss differs, several draws decide. The verdict stays open where they cannot, or where so few samples cannot
    be evaluated. Losses that are not finite and torch's own criteria are skipped.
    """
    tolerance, batch, specs = TOLERANCES.get(engine.subject.x.dtype, COARSE), engine.loaded().batch, engine.specs
    found = []
    with engine.owner.amid("a comparison of cuts"), engine.subject.keeping_gradients(), engine.workers.without_hooks():
        for term, part in enumerate(batch.parts):
            if part.size < 2 or not _is_asked(part, specs[part.name]):
                continue
            losses = CutLosses.of(batch, term, largest)
            try:
                rounding = partial(_rounding, engine, losses)
                verdict, draws = _draw(partial(_losses, engine, losses), tolerance, rounding)
            except (WorkerError, WorkerLostError):  # the module cannot evaluate so few samples, or needs its hooks
                verdict, draws = None, [Drawn(math.nan, math.nan, math.nan)]
            if verdict is not False:
                whole, parted = fmean(d.whole for d in draws), fmean(d.one + d.two for d in draws)
                reduction, decided = part.weighting.reduction, verdict is not None
                found.append(Difference(part.name, reduction, losses.parts, whole, parted, decided))
    return found


def _losses(engine: Evaluating, losses: CutLosses, rows: list[tuple[int, int]]) -> torch.Tensor:
    """Evaluate `losses` for rows of its inputs."""
    return _collected(engine, losses, rows)


def _rounding(engine: Evaluating, losses: CutLosses) -> float:
    """Return the rounding error of the loss of all samples; 0, which excuses nothing, where it has no gradient, or one
    that is not finite."""
    try:
        error = _collected(engine, Rounding(losses), [(0, 0)]).item()
    except WorkerError:
        return 0.0
    return error if math.isfinite(error) else 0.0


def _collected(engine: Evaluating, function: PieceFunction, rows: list[tuple[int, int]]) -> torch.Tensor:
    part = Part(Columns(torch.tensor(rows)), None, None, Weighting("mean", len(rows)))
    use, cut = partial(engine.put_together, samples=len(rows)), Cut((0, len(rows)))
    found: torch.Tensor = engine.run_task_amid(Task(function, aside=True), Batch((part,)), Kind.COLLECT, use, cut)
    return found


def _draw(
    losses: Callable[[list[tuple[int, int]]], torch.Tensor], tolerance: float, rounding: Callable[[], float]
) -> tuple[bool | None, list[Drawn]]:
    """Return the verdict, None if undecided, and the losses drawn. `losses` are those of rows as in `CutLosses`;
    `rounding`: the error that it makes, which is asked for only where losses differ."""

    def drawn(*rows: tuple[int, int]) -> list[Drawn]:
        return [Drawn(*row) for row in losses([*rows]).tolist()]

    for apart, here in enumerate(drawn((0, 0), (0, 1))):
        if not differs(here, tolerance) or abs(here.off) <= ERRORS * rounding():
            continue
        draws = [here, *drawn((1, apart))]
        if not differs(Drawn(here.whole, draws[1].whole, 0.0), tolerance):
            return True, [here]
        draws += drawn(*[(later, apart) for later in range(2, DRAWS)])
        verdict = decide_random(draws)
        if verdict is not False:
            return verdict, draws
    return False, []


def _is_asked(part: Part, spec: BatchSpec) -> bool:
    """Tell whether one forward covers several samples, and the loss or its batching is the user's own."""
    if not isinstance(part.inputs, Columns) and part.collate is None:
        return False
    criterion = spec.criterion
    is_known = is_torchs_own(criterion) and not criterion._forward_hooks and not criterion._forward_pre_hooks
    return not is_known or spec.denominators is not None or spec.collate is not None


def locate_nonfinite(engine: Evaluating, kind: Kind, cut: Cut, batch: Batch, name: str = "gradient") -> NonFiniteError:
    """Return the error for the evaluation or task that follows, which is not finite. Evaluates again, without hooks, to
    find the origin. `name` describes the result other than the loss."""
    counters, workers = engine.past.counters, engine.workers
    with workers.without_hooks():
        chunk, samples, what = _origin(workers.backend, cut, workers.number, counters.steps, kind, name)
    where = batch.numbering.within(samples)
    return NonFiniteError(what, chunk, samples, counters.steps, counters.evaluations + 1, where)


def _origin(
    backend: Backend, cut: Cut, number: Callable[[], int], step: int, kind: Kind, name: str
) -> tuple[int | None, range, str]:
    """Return the first chunk that is not finite, the fewest of its samples that are not finite by themselves, and a
    description of the value that is not finite: found by evaluating halves of the chunks, then halves of the samples.
    No chunk if all are finite: a hook changed the result, or the sum is too large for the dtype."""

    def what(cut: Cut, some: range) -> str:
        counts = split_batch(len(some), [1.0] * len(backend.workers))
        shares = [(some.start + first, some.start + last) for first, last in runs(counts)]
        answers = backend.evaluate(cut, Order(number(), step, some.start, some.stop, kind), shares)
        return next(filter(None, (_what(answer, name) for answer in answers)), "")

    def is_nothing(chunk: int) -> bool:
        """Tell whether its loss is finite once the samples of the adjacent chunk are added."""
        first = max(chunk - 1, 0)
        try:
            return cut.chunks > 1 and not what(Cut((cut.bounds[first], cut.bounds[first + 2])), range(1))
        except WorkerError:  # there is no room for both
            return False

    chunks = _narrow(range(cut.chunks), lambda some: what(cut, some))
    reason = what(cut, chunks)
    if not reason or len(chunks) > 1:
        return None, range(0), f"{'' if kind is Kind.TOTAL else 'loss or '}{name} is not finite"
    samples = range(*cut.bounds[chunks.start : chunks.stop + 1])

    def what_of_samples(some: range) -> str:
        try:
            return what(Cut((some.start, some.stop)), range(1))
        except WorkerError:  # the module cannot evaluate so few samples
            return ""

    found = _narrow(samples, what_of_samples)
    if kind is Kind.EVALUATE and reason == "loss is nan" and is_nothing(chunks.start):
        reason += (
            " (and finite together with the chunk beside it: a mean over no counted targets is NaN: pass "
            "`denominators`, each sample's contribution to the divisor)"
        )
    return chunks.start, found, reason


def _narrow(items: range, what: Callable[[range], str]) -> range:
    """Bisect to the smallest range that is still not finite by itself."""
    while len(items) > 1:
        middle = (items.start + items.stop) // 2
        halves = range(items.start, middle), range(middle, items.stop)
        bad = next((half for half in halves if what(half)), None)
        if bad is None:
            return items
        items = bad
    return items


def _what(answer: Answer, name: str) -> str:
    """Describe the value that is not finite; empty if all are finite."""
    for _, found in answer.partials:
        bad = next((loss for loss in found.losses if not math.isfinite(loss)), None)
        if bad is not None:
            return f"loss is {bad}"
        if not all_finite(found.gradient):
            return f"{name} is not finite"
    return ""
