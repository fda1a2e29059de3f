"""The reduce: merging the workers' partials along the chunk tree into f and df/dX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from operator import add, mul
from threading import Thread
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt_workers.evaluate.tree import Fold, Node, maximal
from batchopt_workers.wire.structures import all_finite

# Elements of the vectors that are summed at a time: they are still in the processor's cache when they are read again.
BLOCK = 2**18
# Elements up to which the faster function's call overhead exceeds its saving.
FEW = 2**13
# Elements up to which torch adds vectors in the calling thread.
SHORT = 2**15
# Elements from which starting threads is worthwhile.
LARGE = 2**20

Numbers = npt.NDArray[Any]
# Of three vectors, the first two are added into the third.
Addition = tuple[int, int, int]


class Whole(NamedTuple):
    """The sum of all partials: the loss of each term, the changes of buffers, which parameters have a gradient, and
    whether the losses and each element of the gradient are finite."""

    losses: tuple[float, ...]
    changes: torch.Tensor
    used: bytes
    finite: bool


class Reduction:
    """The sum of the partials of `chunks` chunks along their tree. It can be repeated as long as only the numbers in
    the memory of these partials change. A chunk that several workers evaluated counts once. The bits do not depend on
    the distribution of chunks."""

    def __init__(self, answers: Sequence[Answer], chunks: int) -> None:
        found = [(node, partial) for answer in answers for node, partial in answer.partials]
        counted = {node: i for i, (node, _) in enumerate(found)}
        nodes = [*counted]
        if sum(node.chunks(chunks) for node in nodes) != chunks:
            nodes = list(maximal(counted, chunks))
        self.partials = [partial for _, partial in found]
        merges: list[tuple[int, int]] = []  # the second of each pair is added to the first, in order

        def merge(left: int, right: int) -> int:
            merges.append((left, right))
            return left

        self._merges = merges  # `merge` refers to it, not to this object: a cycle would delay its release
        self._fold: Fold[int] = Fold(chunks, merge)
        for node in sorted(nodes, key=lambda node: node.first_chunk):
            self._fold.add(node, counted[node])
        self._root = self._fold.root if self._fold.is_complete else -1
        self._used = [partial.used for partial in self.partials]
        for left, right in self._merges:
            if self._used[left] != self._used[right]:
                self._used[left] = bytes(map(max, self._used[left], self._used[right]))
        self._gradients = [partial.gradient for partial in self.partials]
        self._arrays: list[Numbers] = []  # the gradients for NumPy
        self._additions, self._spare = _additions(self._merges)

    def whole(
        self,
        losses: Sequence[Sequence[float]],
        gradient: torch.Tensor,
        written: bool = False,
        finite: bool | None = None,
    ) -> Whole:
        """Sum the current vectors, and these losses of each partial, in the order of the answers; write df/dX to
        `gradient` (shape `(n,)`), unless it is there (`written`); `finite`: whether it is, if that is known. May
        overwrite the workers' memory. Raise `LookupError` if a chunk is missing."""
        root = self._fold.root if self._root < 0 else self._root
        if written:
            finite = all_finite(gradient) if finite is None else finite
        else:
            with torch.inference_mode():  # some of the workers' memory may have been mapped in inference mode
                losses, finite = self._add_losses(losses), self._add_gradients(root, gradient)
        for loss in losses[root]:
            finite = finite and math.isfinite(loss)
        return Whole(tuple(losses[root]), self.partials[root].changes, self._used[root], finite)

    def merged(self) -> list[tuple[Node, Partial]]:
        """Return the merged partials, in chunk order, in the workers' memory."""
        with torch.inference_mode():
            losses = self._add_losses([partial.losses for partial in self.partials])
            for left, right in self._merges:
                self._gradients[left].add_(self._gradients[right])
        return [
            (node, Partial(tuple(losses[i]), self._gradients[i], self.partials[i].changes, self._used[i]))
            for node, i in self._fold.partials
        ]

    def _add_losses(self, losses: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Add the losses, and the changes of buffers."""
        sums, partials = [*losses], self.partials
        for left, right in self._merges:
            sums[left] = tuple(map(add, sums[left], sums[right]))
            if partials[left].changes.shape[0]:
                partials[left].changes.add_(partials[right].changes)
        return sums

    def _add_gradients(self, root: int, out: torch.Tensor) -> bool:
        """Add the gradients into `out`, and return whether the result is finite.

        Long ones are added by NumPy, a block at a time: torch's threads, which end before an evaluation, take 2 or 9 ms
        for the same sum, depending on where they are started.
        """
        gradients, merges, size = self._gradients, self._merges, out.shape[0]
        if size < SHORT or not merges or out.device.type != "cpu" or out.dtype != gradients[root].dtype:
            for left, right in merges:
                gradients[left].add_(gradients[right])
            out.copy_(gradients[root])
            return all_finite(out)
        self._arrays = self._arrays or [gradient.numpy() for gradient in gradients]
        result = out.numpy()
        threads = torch.get_num_threads() if size >= LARGE else 1
        bounds = [i * size // threads for i in range(threads + 1)]
        finite: list[bool] = []

        def add_part(start: int, stop: int) -> None:
            finite.append(_add(self._arrays, self._additions, self._spare, result[start:stop], start))

        helpers = [Thread(target=add_part, args=ends) for ends in pairwise(bounds[1:])]
        for helper in helpers:
            helper.start()
        add_part(*bounds[:2])
        for helper in helpers:
            helper.join()
        return len(finite) == threads and all(finite)


def _additions(merges: Sequence[tuple[int, int]]) -> tuple[list[Addition], int]:
    """Return the additions that merge vectors along `merges`, and the number of spare vectors. Vectors are numbered as
    in `merges`; the result is -1, and spare ones are below. Merged vectors are read once."""
    where: dict[int, int] = {}  # the spare vector of a sum, by the number of its left operand
    free: list[int] = []
    found: list[Addition] = []
    spare = 0
    for left, right in merges:
        one, two = where.pop(left, left), where.pop(right, right)
        free += [vector for vector in (one, two) if vector < 0]
        if not free:
            spare += 1
            free.append(-1 - spare)
        where[left] = free.pop()
        found.append((one, two, where[left]))
    return [*found[:-1], (*found[-1][:2], -1)] if found else [], spare


def _add(vectors: Sequence[Numbers], additions: Sequence[Addition], spare: int, out: Numbers, start: int) -> bool:
    """Perform `additions` on the elements of `vectors` from `start` on into `out`, a block at a time. Return whether
    the result is finite."""
    finite, add = True, np.add
    memory = [np.empty(min(BLOCK, len(out)), out.dtype) for _ in range(spare)]
    with np.errstate(all="ignore"):  # overflow is checked for
        for first in range(0, len(out), BLOCK):
            result = out[first : first + BLOCK]
            block = slice(start + first, start + first + len(result))
            parts = [vector[block] for vector in vectors] + [vector[: len(result)] for vector in memory] + [result]
            for left, right, into in additions:
                add(parts[left], parts[right], parts[into])
            # einsum takes half the time of `sum`; if the sum overflows, each element is checked
            total = np.add.reduce(result) if len(result) < FEW else np.einsum("i->", result)
            finite = finite and (math.isfinite(total) or bool(np.isfinite(result).all()))
    return finite


class Pattern:
    """Evaluations that repeat each other: the same workers have the same chunks, of `chunks` in all, and their partials
    lie in the same memory; `answers` are those of the first one. `stragglers`: by rank of each worker that
    was late in it, samples, and the seconds that they took, or at least took."""

    def __init__(
        self, answers: Sequence[Answer], chunks: int, stragglers: Mapping[int, tuple[int, float]] = MappingProxyType({})
    ) -> None:
        self.answers, self.stragglers, self._chunks = [*answers], stragglers, chunks
        self.times = [(answer.spans[0].began if answer.spans else 0.0, answer.seconds) for answer in answers]

    @cached_property
    def reduction(self) -> Reduction:
        """The sum of all partials."""
        return Reduction(self.answers, self._chunks)

    @cached_property
    def hook_results(self) -> list[Any]:
        """The results of the posthook, in sample order; of repetitions they are None, too."""
        found = {chunk: results for answer in self.answers for chunk, results in answer.results.items()}
        return [result for _, of_chunk in sorted(found.items()) for result in of_chunk]

    @cached_property
    def drew(self) -> bool:
        """Tell whether random numbers were drawn."""
        return any(answer.drew for answer in self.answers)


class Answers(Sequence[Answer]):
    """The answers of an evaluation, in rank order, with the `times` (start and seconds) of each worker. Of one that
    repeats the `pattern`, only these and the `losses` of each partial differ. `written`: the gradient is where it is to
    be, and `finite`, if that is known."""

    def __init__(
        self,
        pattern: Pattern,
        losses: Sequence[Sequence[float]] | None = None,
        times: Sequence[tuple[float, float]] = (),
        written: bool = False,
        finite: bool | None = None,
    ) -> None:
        self.pattern, self.losses, self.written = pattern, losses, (written, finite)
        self.times = pattern.times if losses is None else times

    @cached_property
    def _all(self) -> list[Answer]:
        if self.losses is None:
            return self.pattern.answers
        losses = iter(self.losses)
        return [
            replace(
                answer,
                seconds=seconds,
                spans=[Span(began, seconds, answer.spans[0].first, answer.spans[-1].last)],
                partials=[(node, partial._replace(losses=tuple(next(losses)))) for node, partial in answer.partials],
            )
            for answer, (began, seconds) in zip(self.pattern.answers, self.times, strict=True)
        ]

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self.pattern.answers)


def reduce_answers(answers: Sequence[Answer], chunks: int, gradient: torch.Tensor) -> Whole:
    """Return the sum of all partials, of `chunks` chunks, and write df/dX to `gradient`: see `Reduction.whole`."""
    found = answers if isinstance(answers, Answers) else Answers(Pattern(answers, chunks))
    reduction = found.pattern.reduction
    losses = [partial.losses for partial in reduction.partials] if found.losses is None else found.losses
    return reduction.whole(losses, gradient, *found.written)


def merge_answers(answers: Sequence[Answer], chunks: int) -> list[tuple[Node, Partial]]:
    """Sum the partials of some of `chunks` chunks as far as their tree allows, and return the results in chunk order.
    The final bits do not depend on how often and where this is done on the way."""
    return Reduction(answers, chunks).merged()


def weighed(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Return f: the sum of each term's loss times its weight, in their order."""
    return float(sum(map(mul, losses, weights)))
