"""The reduce: merging the workers' partials along the chunk tree into f and df/dX."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchopt.backends import Answer, Partial
from batchopt_workers.tree import Fold, maximal


def merge(left: Partial, right: Partial) -> Partial:
    """The sum of two neighbours, in the memory of the left one."""
    left.gradient.add_(right.gradient)
    left.changes.add_(right.changes)
    used = bytes(map(max, left.used, right.used))
    return Partial(left.loss + right.loss, left.gradient, left.changes, used)


def reduce_answers(answers: Sequence[Answer], chunks: int) -> Partial:
    """The partial of the whole batch of `chunks` chunks; its tensors are the workers' memory.

    Its bits do not depend on who evaluated what. A chunk that several workers evaluated counts once. Raises
    `LookupError` if a chunk is missing.
    """
    fold: Fold[Partial] = Fold(chunks, merge)
    found = {node: partial for answer in answers for node, partial in answer.partials}
    with torch.no_grad():
        for node in sorted(maximal(found, chunks), key=lambda node: node.first_chunk):
            fold.add(node, found[node])
    return fold.root
