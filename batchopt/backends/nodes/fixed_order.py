"""The sum of the members' vectors along the tree of chunks, by sends and receives, with the same bits on all members.

Short vectors are sent as a whole to the members that take the sum. Longer ones are cut into slices, one for each member
that holds any: it receives that slice of all vectors, adds them, and sends the result. So every byte crosses the
network about twice for any number of members, and all of them send and receive at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from batchopt._mapreduce.answers import Answer, Partial
from batchopt._mapreduce.reduce import Reduction, Whole
from batchopt.backends.nodes.group import Group
from batchopt_workers.map.tree import Node

# Largest vector in bytes that is sent as a whole, within its record: more messages take longer than more bytes.
WHOLE = 2**17
# Blocks of a slice: the sum of one is sent while the next one is received.
BLOCKS = 4
_RESULT = 3  # a tag: blocks of results arrive in order
_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


class Vectors(NamedTuple):
    """`number` vectors of `size` elements."""

    number: int
    size: int
    dtype: torch.dtype


class Held(NamedTuple):
    """The vectors held by the members: the place of each in the tree, by member; `chunks` are below the root, and
    vectors have `size` elements."""

    places: Sequence[Sequence[Node]]
    chunks: int
    size: int
    dtype: torch.dtype


def gathered(
    group: Group, forms: Sequence[Vectors], mine: Sequence[torch.Tensor], takers: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Return the vectors of each member, which have these forms; nothing on members that do not take them."""
    found: list[list[torch.Tensor]] = [[] for _ in forms]
    for other in group.others:
        if group.place in takers:
            number, size, dtype = forms[other]
            found[other] = [torch.empty(size, dtype=dtype, device="cpu") for _ in range(number)]
            for vector in found[other]:
                group.receive(vector, other)
        if other in takers:
            for vector in mine:
                group.send(vector, other)
    group.wait()
    if group.place in takers:
        found[group.place] = list(mine)
    return found


class FixedOrderSum:
    """Adds vectors in memory that it keeps: a result is valid until the next one."""

    def __init__(self, group: Group, takers: Sequence[int]) -> None:
        self._group, self._takers = group, takers
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, held: Held, mine: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the sum of these vectors and those of the others, on members that take it. Raises `NodeLostError`."""
        group, (places, chunks, size, dtype) = self._group, held
        holders = [place for place, nodes in enumerate(places) if nodes]
        takes = group.place in self._takers
        blocks = {place: _blocks(size, i, len(holders)) for i, place in enumerate(holders)}
        out, own = self._empty("sum", size, dtype), blocks.get(group.place, [])
        # memory for the others' elements that are added here, vector by vector
        strangers = sum(len(nodes) for place, nodes in enumerate(places) if place != group.place)
        width = own[-1].stop - own[0].start if own else 0
        memory = iter(self._empty("others", strangers * width, dtype).view(strangers, width) if own else ())
        rows = {other: [next(memory) for _ in places[other]] for other in group.others} if own else {}
        coming = []
        for block in own:
            inner = slice(block.start - own[0].start, block.stop - own[0].start)
            coming.append([group.receive(row[inner], other) for other, of in rows.items() for row in of])
        # Block by block, in the order of the sums, so that the first sums are sent while the last blocks arrive.
        for number in range(max(map(len, blocks.values()))):
            for other in group.others:
                for block in blocks.get(other, [])[number : number + 1]:
                    for vector in mine:
                        group.send(vector[block], other)
        if takes:
            for other in group.others:
                for block in blocks.get(other, []):
                    group.receive(out[block], other, _RESULT)
        for block, some in zip(own, coming, strict=True):
            group.wait(some)
            inner = slice(block.start - own[0].start, block.stop - own[0].start)
            found = [[row[inner] for row in rows.get(place, [])] for place in range(group.size)]
            found[group.place] = [vector[block] for vector in mine]
            _add(places, chunks, found, out[block])
            for other in group.others:
                if other in self._takers:
                    group.send(out[block], other, _RESULT)
        group.wait()
        return out if takes else None

    def _empty(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.dtype != dtype or len(memory) != size:
            memory = self._memory[name] = torch.empty(size, dtype=dtype, device="cpu")
        return memory


def _blocks(size: int, number: int, count: int) -> list[slice]:
    """Return slice `number` of `count`, in blocks."""
    first, last = size * number // count, size * (number + 1) // count
    ends = [first + (last - first) * i // BLOCKS for i in range(BLOCKS + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _add(
    places: Sequence[Sequence[Node]], chunks: int, found: Sequence[Sequence[torch.Tensor]], out: torch.Tensor
) -> None:
    partials = [
        (node, Partial((), vector, _NOTHING, b""))
        for nodes, vectors in zip(places, found, strict=True)
        for node, vector in zip(nodes, vectors, strict=True)
    ]
    whole_of(partials, chunks, out)


def whole_of(partials: list[tuple[Node, Partial]], chunks: int, out: torch.Tensor) -> Whole:
    """Return the sum of all partials, whose vectors are added into `out`."""
    return Reduction([Answer(0, 0, 0.0, partials)], chunks).whole([partial.losses for _, partial in partials], out)
