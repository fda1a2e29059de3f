"""The interface for starting nodes on machines, and the distribution of workers and chunks over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from batchopt._mapreduce.plan import split_batch


class Capacity(NamedTuple):
    """A machine, and how many more workers fit there."""

    machine: str
    workers: int


class NodeProcess(Protocol):
    """A node's process."""

    def gone(self) -> str | None:
        """Return the reason why it has ended; None while it has not."""

    def kill(self) -> None:
        """End it, and the workers that it has started; a second call does nothing."""


class Placer(Protocol):
    """Starts nodes on machines."""

    address: str  # of this machine, for them

    def rooms(self, whole: bool = False) -> list[Capacity]:
        """List the room for more workers; with `whole`, as if the machines had no other users."""

    def place(self, machine: str, workers: int, address: str, port: int, number: int) -> NodeProcess:
        """Start `serve(address, port, number)` on that machine, with cores for `workers` workers."""

    def refusal(self, workers: int, free: int, whole: int) -> str:
        """Explain why there is no room for `workers` workers, and what can be done."""


def spread(workers: int, rooms: Sequence[Capacity]) -> list[Capacity]:
    """Distribute `workers` over machines in proportion to their room; machines that get none are omitted.

    Raises `ValueError` if they do not fit.
    """
    room = sum(r.workers for r in rooms)
    if workers > room:
        raise ValueError(f"{workers} workers do not fit where there is room for {room}")
    if not workers:
        return []
    shares = split_batch(workers, [float(r.workers) for r in rooms])
    return [Capacity(r.machine, share) for r, share in zip(rooms, shares, strict=True) if share]


def free_ranks(taken: Sequence[range], workers: int) -> list[range]:
    """Return the runs of ranks below `workers` that are in none of the ranges."""
    found, at = [], 0
    for ranks in sorted(taken, key=lambda ranks: ranks.start):
        if ranks.start > at:
            found.append(range(at, ranks.start))
        at = max(at, ranks.stop)
    return [*found, range(at, workers)] if at < workers else found


def placements(homeless: Sequence[range], rooms: Sequence[Capacity], most: int) -> list[tuple[str, range]]:
    """Choose machines for at most `most` workers of these ranks, as far as there is room; each node gets consecutive
    ranks."""
    free, found = {room.machine: room.workers for room in rooms}, []
    for ranks in homeless:
        at, stop = ranks.start, min(ranks.stop, ranks.start + most)
        for machine in sorted(free, key=lambda machine: -free[machine]):
            count = min(free[machine], stop - at)
            if count > 0:
                found.append((machine, range(at, at + count)))
                free[machine] -= count
                at, most = at + count, most - count
    return found


# The part of a node's share that may be moved to another one for this.
SLACK = 1 / 16


def aligned(shares: Sequence[int], nodes: Sequence[range]) -> list[int]:
    """Return the number of chunks of each worker, if each node has the workers of some ranks: as planned, but with the
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
    """Return the multiple of the largest power of two within `slack`."""
    size = 1
    while size <= bound and abs(_nearest(bound, 2 * size) - bound) <= slack:
        size *= 2
    return _nearest(bound, size)


def _nearest(bound: int, size: int) -> int:
    return (bound + size // 2) // size * size
