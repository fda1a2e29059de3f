"""Cutting a plan so that nodes have whole cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from batchopt._mapreduce.split import runs, split_batch

# A node is given no more than so many times what was planned for it.
MOST = 1.5


def aligned(shares: Sequence[int], nodes: Sequence[int | None], size: int) -> list[int]:
    """The number of chunks of each worker, where each is on one of the `nodes`: changed so that what a node has begins
    and ends at multiples of `size` chunks. The same, if a node would be left without any or get much more."""
    chunks = sum(shares)
    groups = [[rank for rank, _ in group] for _, group in groupby(enumerate(nodes), key=lambda item: item[1])]
    planned = [sum(shares[rank] for rank in group) for group in groups]
    cells = accumulate(split_batch(math.ceil(chunks / size), [float(count) for count in planned]))
    found = [last - first for first, last in pairwise([0, *(min(end * size, chunks) for end in cells)])]
    if any(before and not 0 < after <= MOST * before for before, after in zip(planned, found, strict=True)):
        return list(shares)
    moved = list(shares)
    for group, count in zip(groups, found, strict=True):
        weights = [float(shares[rank]) for rank in group]
        for rank, share in zip(group, split_batch(count, weights), strict=True):
            moved[rank] = share
    return moved


def whole_cells(given: Sequence[tuple[int, int]], size: int, chunks: int) -> list[int]:
    """The cells of `size` chunks, of `chunks` in all, that lie in some runs of chunks together."""
    taken = bytearray(chunks)
    for first, last in given:
        taken[first:last] = b"\1" * (last - first)
    return [cell for cell, (first, last) in enumerate(_cells(size, chunks)) if all(taken[first:last])]


def _cells(size: int, chunks: int) -> list[tuple[int, int]]:
    full, rest = divmod(chunks, size)
    return runs([size] * full + [rest] * bool(rest))
