"""The reduce: merging the workers' partials along the chunk tree into f and df/dX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import add, mul
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchopt._mapreduce.answers import Answer, Partial
from batchopt_workers.tree import Fold, Node, maximal

# Elements of the vectors that are summed at a time: what was written last is still in the processor's cache when it is
# looked at again.
BLOCK = 2**18
# Elements from which on it pays to start threads.
LARGE = 2**20

Numbers = npt.NDArray[Any]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Whole(NamedTuple):
    """The sum of all partials: the loss of each term, the changes of buffers, which parameters have a
    gradient, and whether the losses and each element of the gradient are finite."""

    losses: tuple[float, ...]
    changes: torch.Tensor
    used: bytes
    finite: bool


def reduce_answers(answers: Sequence[Answer], chunks: int, gradient: torch.Tensor) -> Whole:
    """Sum the partials of the whole batch of `chunks` chunks; writes df/dX to `gradient` (shape `(n,)`) and overwrites
    the workers' memory.

    Its bits do not depend on who evaluated what. A chunk that several workers evaluated counts once. Raises
    `LookupError` if a chunk is missing. Each partial is read once.
    """
    fold, pairs = _merged(answers, chunks)
    root = fold.root
    with torch.no_grad():
        finite = _sum(pairs, root.gradient, gradient) and all(map(math.isfinite, root.losses))
    return Whole(root.losses, root.changes, root.used, finite)


def merge_answers(answers: Sequence[Answer], chunks: int, top: int | None = None) -> list[tuple[Node, Partial]]:
    """Sum the partials of some of `chunks` chunks as far as their tree goes, or up to its level `top`, in the workers'
    memory: what is left, in chunk order. With the same bits, however often and by whom that is done on the way to the
    whole."""
    fold, pairs = _merged(answers, chunks, top)
    if pairs:
        last, _ = pairs[-1]
        with torch.no_grad():
            _sum(pairs, last, last)
    return fold.partials


def _merged(answers: Sequence[Answer], chunks: int, top: int | None = None) -> tuple[Fold[Partial], Pairs]:
    """All partials, each chunk once, merged up to their gradients; and the pairs of gradients to be added, in order,
    the second to the first."""
    found = {node: partial for answer in answers for node, partial in answer.partials}
    nodes = list(found)
    if sum(node.chunks(chunks) for node in nodes) != chunks:
        nodes = list(maximal(found, chunks))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def merge(left: Partial, right: Partial) -> Partial:
        """The sum of two neighbours, in the memory of the left one."""
        pairs.append((left.gradient, right.gradient))
        if len(left.changes):
            left.changes.add_(right.changes)
        used = left.used if left.used == right.used else bytes(map(max, left.used, right.used))
        losses = tuple(map(add, left.losses, right.losses))
        return Partial(losses, left.gradient, left.changes, used)

    with torch.no_grad():
        fold: Fold[Partial] = Fold(chunks, merge, top)
        for node in sorted(nodes, key=lambda node: node.first_chunk):
            fold.add(node, found[node])
    return fold, pairs


def weighed(losses: Sequence[float], weights: Sequence[float]) -> float:
    """f: the sum of each term's loss times its weight, in their order."""
    return float(sum(map(mul, losses, weights)))


def _sum(pairs: Pairs, root: torch.Tensor, out: torch.Tensor) -> bool:
    """Add the second of each pair to the first, in order, the last pair into `out`; or copy `root` there if there is
    none. Returns whether the result is finite.

    By NumPy: torch's threads would spin for milliseconds after, on cores that the workers need for the next evaluation.
    """
    if out.device.type != "cpu" or out.dtype != root.dtype:
        return _sum_and_round(pairs, root, out)
    vectors = [(left.numpy(), right.numpy()) for left, right in pairs], root.numpy(), out.numpy()
    if len(out) < LARGE:
        return _sum_slice(*vectors, slice(0, len(out)))
    threads = torch.get_num_threads()
    bounds = [i * len(out) // threads for i in range(threads + 1)]
    finite: list[bool] = []
    parts = [slice(*ends) for ends in pairwise(bounds)]
    helpers = [Thread(target=lambda part=part: finite.append(_sum_slice(*vectors, part))) for part in parts[1:]]
    for helper in helpers:
        helper.start()
    finite.append(_sum_slice(*vectors, parts[0]))
    for helper in helpers:
        helper.join()
    return all(finite)


def _sum_slice(pairs: Sequence[tuple[Numbers, Numbers]], root: Numbers, out: Numbers, part: slice) -> bool:
    """The same for a part of the vectors."""
    finite = True
    with np.errstate(all="ignore"):  # what overflows is looked at
        for start in range(part.start, part.stop, BLOCK):
            block = slice(start, min(start + BLOCK, part.stop))
            for left, right in pairs[:-1]:
                np.add(left[block], right[block], out=left[block])
            result = out[block]
            if pairs:
                np.add(pairs[-1][0][block], pairs[-1][1][block], out=result)
            else:
                result[...] = root[block]
            # einsum sums in half the time of `sum`; where the sum overflows, each element is looked at
            finite = finite and (math.isfinite(np.einsum("i->", result)) or bool(np.isfinite(result).all()))
    return finite


def _sum_and_round(pairs: Pairs, root: torch.Tensor, out: torch.Tensor) -> bool:
    for left, right in pairs:
        left.add_(right)
    out.copy_(pairs[-1][0] if pairs else root)
    return all_finite(out)


def all_finite(vector: torch.Tensor) -> bool:
    """Whether each element is. A sum is finite if its terms are, but for an overflow, so one cheap pass mostly is
    enough."""
    return math.isfinite(vector.sum().item()) or bool(vector.isfinite().all())
