"""The sum of the members' vectors along the tree of chunks, by sends and receives, with the same bits on all members.

Short vectors are sent as a whole to the members that take the sum. Longer ones are cut into slices, one for each member
that holds any: it receives that slice of all vectors, adds them, and sends the result. So every byte crosses the
network about twice for any number of members, and all of them send and receive at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from batchopt._mapreduce.answers import Answer, Partial
from batchopt._mapreduce.reduce import Reduction, Whole
from batchopt.backends.nodes.group import Group
from batchopt.backends.nodes.result import NOTHING
from batchopt_workers.evaluate.tree import Node

# Blocks of a slice: the sum of one is sent while the next one is received.
BLOCKS = 4
_RESULT = 3  # a tag: blocks of results arrive in order


class FixedOrderSum:
    """Adds vectors in memory that it keeps: a result is valid until the next one."""

    def __init__(self, group: Group, takers: Sequence[int]) -> None:
        self._group, self._takers = group, takers
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(
        self, nodes: Sequence[Sequence[Node]], chunks: int, size: int, dtype: torch.dtype, mine: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the sum of the vectors of all members, of `size` elements: of each member those at these `nodes` of
        the tree of `chunks` chunks, of which this one has `mine`. None on members that do not take it. Raises
        `NodeLostError`."""
        group, here = self._group, self._group.place
        holders = [place for place, of in enumerate(nodes) if of]
        blocks = {place: _blocks(size, i, len(holders)) for i, place in enumerate(holders)}
        out, own = self._empty("sum", size, dtype), blocks.get(here, [])
        # memory for the others' elements that are added here, vector by vector
        strangers = sum(len(nodes[other]) for other in group.others)
        width = own[-1].stop - own[0].start if own else 0
        memory = iter(self._empty("others", strangers * width, dtype).view(strangers, width) if own else ())
        rows = {other: [next(memory) for _ in nodes[other]] for other in group.others} if own else {}
        inner = [slice(block.start - own[0].start, block.stop - own[0].start) for block in own]
        coming = [[group.receive(row[part], other) for other, of in rows.items() for row in of] for part in inner]
        # Block by block, in the order of the sums, so that the first sums are sent while the last blocks arrive.
        for number in range(BLOCKS):
            for other in group.others:
                for block in blocks.get(other, [])[number : number + 1]:
                    for vector in mine:
                        group.send(vector[block], other)
        if here in self._takers:
            for other in group.others:
                for block in blocks.get(other, []):
                    group.receive(out[block], other, _RESULT)
        for block, part, some in zip(own, inner, coming, strict=True):
            group.wait(some)
            vectors = {other: [row[part] for row in of] for other, of in rows.items()}
            vectors[here] = [vector[block] for vector in mine]
            partials = [
                (node, Partial((), vector, NOTHING, b""))
                for place, of in vectors.items()
                for node, vector in zip(nodes[place], of, strict=True)
            ]
            whole_of(partials, chunks, out[block])
            for other in group.others:
                if other in self._takers:
                    group.send(out[block], other, _RESULT)
        group.wait()
        return out if here in self._takers else None

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


def whole_of(partials: list[tuple[Node, Partial]], chunks: int, out: torch.Tensor) -> Whole:
    """Return the sum of all partials, whose vectors are added into `out`."""
    return Reduction([Answer(0, 0, 0.0, partials)], chunks).whole([partial.losses for _, partial in partials], out)
