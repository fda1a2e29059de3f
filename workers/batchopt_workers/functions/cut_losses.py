"""The losses of a few samples in one forward and in two: whether f depends on how its batch is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from batchopt_workers.batch.batch import Batch, Columns, Part, Piece, Samples
from batchopt_workers.batch.items import Items
from batchopt_workers.functions.task import PieceContext
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.structures import tensors_in

# Number of samples evaluated per term.
SAMPLES = 8
# Samples, and elements of a tensor, among which the extreme ones are looked for.
_CANDIDATES, _ELEMENTS = 1024, 2**22


def split(samples: int, largest: int) -> tuple[int, int]:
    """Return the sizes of the two parts to evaluate, unequal if possible. Together they have at most as many samples as
    the `largest` chunk, where that has two or more."""
    count = min(SAMPLES, samples, max(largest, 2))
    one = max(count * 3 // 8, 1)
    return one, count - one


@dataclass(frozen=True)
class CutLosses:
    """Losses of samples of the term with the index `term`: in one forward, and in two of the sizes `parts`.

    For each row of the piece's inputs, of the form `(later, apart)`, shape `(3,)`: of all, of the first part and of the
    second, as they count in all, with the draws of the step that is `later` by so many. In both parts are samples from
    everywhere; or, `apart`, the first ones in one and the last ones in the other, which differ most where data is
    sorted, and may have no loss of their own. `samples`: their numbers; `part`: their data, None for items of a
    dataset, which the worker has.
    """

    term: int
    parts: tuple[int, int]
    samples: list[int]
    part: Part | None

    @classmethod
    def of(cls, batch: Batch, term: int, largest: int) -> CutLosses:
        """Return the losses of samples that are spread over a batch, no more than there are in the `largest` chunk."""
        part = batch.parts[term]
        parts = split(part.size, largest)
        samples = spread(part, sum(parts))
        return cls(term, parts, samples, None if isinstance(part.inputs, Items) else part.picked(samples))

    def batches(self, context: PieceContext) -> list[Batch]:
        """Return the samples in both orders, and none of other terms."""
        all_parts, numbers = context.batch().parts, [*range(sum(self.parts))]
        part = self.part or all_parts[self.term].picked(self.samples)
        return [
            Batch(tuple(part.picked(order) if i == self.term else p.picked(()) for i, p in enumerate(all_parts)))
            for order in ([*numbers[::2], *numbers[1::2]], numbers)
        ]

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        (one, two), batches = self.parts, self.batches(context)

        def losses(later: int, apart: int) -> Iterator[float]:
            for start, stop in ((0, one + two), (0, one), (one, one + two)):
                yield context.evaluate(Cut((start, stop)), False, batches[apart], later)[0][self.term]

        return torch.tensor([[*losses(*row)] for row in piece.inputs.tolist()], dtype=torch.float64)


@dataclass(frozen=True)
class Rounding:
    """The rounding error of the loss of all samples of `losses`, as far as X shows it: what errors of X of one unit in
    the last place make of it together. It is large beside the loss where this is a sum of terms that cancel."""

    losses: CutLosses

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        parameters = [parameter.detach() for parameter in context.parameters]
        if any(parameter.is_complex() for parameter in parameters):
            return torch.zeros(1)
        gradient = context.evaluate(Cut((0, sum(self.losses.parts))), True, self.losses.batches(context)[0]).gradient
        x = torch.cat([parameter.flatten() for parameter in parameters])
        change: torch.Tensor = torch.linalg.vector_norm(gradient.double() * x.double())
        return torch.finfo(x.dtype).eps * change.reshape(1).cpu()


def spread(part: Part, count: int) -> list[int]:
    """Return `count` samples, in order: the first and the last, those with the largest and the smallest targets, with
    the most and the least padding, and others at equal distances.

    Of data that is sorted, by length, class or anything else, neighbours are alike, and show no difference.
    """
    last = part.size - 1
    found = dict.fromkeys((0, last, *_extremes(part)))
    found |= dict.fromkeys(i * last // max(count - 1, 1) for i in range(count))
    return sorted([*(found | dict.fromkeys(range(count)))][:count])


def _extremes(part: Part) -> Iterator[int]:
    """Yield the samples of the largest and the smallest targets, and of the most and the least equal neighbours in a
    row of them, as padding has; of the inputs likewise. Items would have to be read for that."""
    for form in (part.targets, part.inputs):
        if isinstance(form, Columns):
            columns = [t for t in tensors_in(form.data) if t.layout is torch.strided and not t.is_complex()]
            scores = [score for column in columns for score in _scores(column)]
        elif isinstance(form, Samples):
            step = -(-len(form) // _CANDIDATES)
            scores = [(torch.tensor([sum(t.numel() for t in tensors_in(item)) for item in form.data[::step]]), step)]
        else:
            scores = []
        for score, step in scores:
            yield int(score.argmax()) * step
            yield int(score.argmin()) * step


def _scores(column: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield two numbers of each row, or of every row after `step` others: the sum, and the number of equal neighbours.
    The second is missing where rows have one element."""
    rows = max(min(_CANDIDATES, _ELEMENTS // max(column[:1].numel(), 1)), 8)
    step = -(-len(column) // rows)
    some = column.detach()[::step].flatten(1) if column.dim() > 1 else column.detach()[::step, None]
    yield some.double().sum(1).nan_to_num_(), step
    if some.shape[1] > 1:
        yield (some[:, 1:] == some[:, :-1]).sum(1), step
