"""The shares of nodes, cut so that each has few whole subtrees of chunks: each of them is a vector on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from batchopt._mapreduce.split import split_batch

# The part of a node's share that may go to another one for it.
SLACK = 1 / 16


def aligned(shares: Sequence[int], nodes: Sequence[range]) -> list[int]:
    """The number of chunks of each worker, where each node has the workers of some ranks: the planned ones, but with
    bounds between nodes moved a little, to where larger subtrees of chunks begin."""
    planned = [sum(shares[rank] for rank in ranks) for ranks in nodes]
    ends = list(accumulate(planned))
    bounds = [0, *(_rounded(end, int(SLACK * min(pair))) for end, pair in zip(ends, pairwise(planned), strict=False))]
    found = [0] * len(shares)
    for ranks, (first, last) in zip(nodes, pairwise([*bounds, ends[-1]]), strict=True):
        if last > first:
            weights = [float(shares[rank]) for rank in ranks]
            for rank, share in zip(ranks, split_batch(last - first, weights), strict=True):
                found[rank] = share
    return found


def _rounded(bound: int, slack: int) -> int:
    """The multiple of the largest power of two that is no further away than `slack`."""
    size = 1
    while size <= bound and abs(_nearest(bound, 2 * size) - bound) <= slack:
        size *= 2
    return _nearest(bound, size)


def _nearest(bound: int, size: int) -> int:
    return (bound + size // 2) // size * size
