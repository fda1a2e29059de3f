"""The cells of compressed evaluations in the parent: who has what is left of them, and what nobody has compressed yet.

A node compresses the cells that it has evaluated all of, and keeps what is left; of others it sends the pieces, which
are merged and compressed here. A node that is given a whole cell whose rest is here gets that with it. One that lacks
the rest (it has taken the cell over from another node) sends the cell as it is; then the rest is fetched from where it
is, and the cell is compressed here. So a rest moves with its cell, and the bits are always the same. Only what was left
on a node that is lost is lost with it.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.answers import Answer, Partial
from batchopt._mapreduce.compression import Compression, DoesNotFit
from batchopt._mapreduce.reduce import merge_answers
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.alignment import aligned, whole_cells
from batchopt.backends.ray.gather import NodeGather, NodeRests
from batchopt.backends.ray.messages import Cells, ResidualName
from batchopt.backends.ray.node import ClusterNode
from batchopt.backends.ray.nodes import Nodes
from batchopt.backends.ray.residuals import Residuals
from batchopt.backends.ray.transfer import Bytes, from_bytes, to_bytes
from batchopt_workers.layout import Layout
from batchopt_workers.messages import Cut, Order


def _names(rests: Mapping[int, int]) -> Iterable[ResidualName]:
    return (ResidualName(*item) for item in rests.items())


class CellReduce:
    """Compresses what nodes have not, and knows where the rests of all cells are."""

    def __init__(self, compression: Compression, nodes: Nodes, layout: Layout, fixed_bits: bool) -> None:
        """Gradients lie as in `layout`. Without `fixed_bits` the cut depends on the workers anyway, and there are no
        more cells than nodes."""
        self._compression, self._nodes, self._fixed_bits = compression, nodes, fixed_bits
        self._size, self._dtype = layout.size, layout.sum_dtype
        # by evaluation: which one had left the rest of each cell when it was over
        self._left: dict[int, Mapping[int, int]] = {0: {}}
        self._holders: dict[ResidualName, int] = {}  # the numbers of nodes
        self._here = Residuals()
        self._warned = False

    # ---- an evaluation

    def begin(self, evaluation: int, chunks: int, taken: int, kept: int) -> Cells:
        """Begin with the rests that evaluation `taken` has left. After this one, evaluations may begin with those of
        `taken`, `kept` or this one."""
        self._left = {number: self._left[number] for number in (0, taken, kept)}
        names = frozenset(name for rests in self._left.values() for name in _names(rests))
        self._here.keep(names)
        self._holders = {name: node for name, node in self._holders.items() if name in names}
        compression, nodes = self._compression, len(self._nodes.ready)
        if not self._fixed_bits:
            compression = replace(compression, parts=max(1, min(compression.parts, nodes)))
        elif compression.parts < nodes:
            self._warn_of_pieces(nodes)
        return self._without_lost(Cells(compression, evaluation, chunks, self._size, self._left[taken], names))

    def aligned(self, orders: Sequence[Order | None], cells: Cells) -> list[Order | None]:
        """The orders, moved so that nodes get whole cells."""
        places = {rank: node.number for node in self._nodes.ready for rank in node.ranks}
        shares = [0 if order is None else order.last - order.first for order in orders]
        order = next(order for order in orders if order is not None)
        found: list[Order | None] = []
        first = 0
        for share in aligned(shares, [places.get(rank) for rank in range(len(orders))], 2**cells.level):
            found.append(replace(order, first=first, last=first + share) if share else None)
            first += share
        return found

    def rests_for(self, node: ClusterNode, given: Iterable[ChunkRun | None], cells: Cells) -> dict[int, Bytes]:
        """The rests of whole cells in these runs that the node lacks and that are here."""
        mine = whole_cells([run for run in given if run is not None], 2**cells.level, cells.chunks)
        names = [ResidualName(cell, cells.rests[cell]) for cell in mine if cell in cells.rests]
        lacking = (name for name in names if name in self._here and self._holders.get(name) != node.number)
        return {name.cell: to_bytes(self._here[name]) for name in lacking}

    def finish(self, gather: NodeGather, cells: Cells, cut: Cut) -> list[Answer]:
        """The answers, in which all partials are cells, compressed or not finite. Raises `DoesNotFit`."""
        with torch_threads(1):
            answers = gather.answers()
            partials = merge_answers(answers, cells.chunks, cells.level)
            raw = {place.position for place, _ in partials if place not in gather.compressed}
            self.fetch(ResidualName(cell, cells.rests[cell]) for cell in raw if cell in cells.rests)
            cells = self._without_lost(cells, raw)
            left = {place.position: node for place, node in gather.compressed.items()}
            for i, (place, partial) in enumerate(partials):
                if place.position in raw and (value := self._value(place.position, partial, cells, cut)) is not None:
                    partials[i] = place, partial._replace(gradient=value)
                    left[place.position] = -1
        self._note(left, cells)
        return [replace(answer, partials=[] if i else partials) for i, answer in enumerate(answers)]

    def _value(self, cell: int, partial: Partial, cells: Cells, cut: Cut) -> torch.Tensor | None:
        """The gradient of a cell as it is once it was compressed."""
        try:
            found = self._here.compress(cell, partial.gradient, cells)
        except DoesNotFit as error:
            first, last = (min(at << cells.level, cells.chunks) for at in (cell, cell + 1))
            raise DoesNotFit(str(error), range(cut.bounds[first], cut.bounds[last])) from None
        return None if found is None else cells.decode(found.code, self._dtype)

    def _note(self, left: Mapping[int, int], cells: Cells) -> None:
        """The evaluation is over, and has left rests of these cells on nodes of these numbers; -1 is here."""
        if cells.compression.keeps_rest:
            self._holders |= {ResidualName(cell, cells.evaluation): node for cell, node in left.items() if node >= 0}
            self._left[cells.evaluation] = {**cells.rests, **dict.fromkeys(left, cells.evaluation)}
        else:
            self._left[cells.evaluation] = {}

    # ---- rests

    def fetch(self, names: Iterable[ResidualName]) -> None:
        """Bring the rests here that are on nodes, unless a node is lost."""
        wanted: dict[int, list[ResidualName]] = defaultdict(list)
        for name in names:
            if name not in self._here:
                wanted[self._holders[name]].append(name)
        listener = NodeRests()
        for number, of_node in wanted.items():
            node = self._nodes.by_number.get(number)
            if node is not None:
                node.ask_for_rests(of_node)
                listener.asked(node, of_node)
        listener.collect(lambda: self._nodes.pump(listener, math.inf))
        self._here.add({name: from_bytes(rest, self._dtype, (-1,)).clone() for name, rest in listener.found.items()})

    def fetch_all(self) -> None:
        """Bring all rests here: their nodes may end."""
        self.fetch({name for rests in self._left.values() for name in _names(rests)})

    def rests_after(self, evaluation: int) -> dict[int, torch.Tensor]:
        """The rests of cells that an evaluation has left."""
        names = list(_names(self._left[evaluation]))
        self.fetch(names)
        lost = [name for name in names if name not in self._here]
        self._warn_of_loss(lost)
        return {name.cell: self._here[name] for name in names if name not in lost}

    def restore(self, evaluation: int, rests: Mapping[int, torch.Tensor]) -> None:
        """Let these be what an evaluation of that number has left."""
        self._here.add({ResidualName(cell, evaluation): rest for cell, rest in rests.items()})
        self._left[evaluation] = dict.fromkeys(rests, evaluation)

    def _without_lost(self, cells: Cells, of: Iterable[int] | None = None) -> Cells:
        """The same without rests (those of the cells `of`) that are on no node and not here: those count as zero."""
        looked_at = cells.rests if of is None else {cell: cells.rests[cell] for cell in of if cell in cells.rests}
        nodes = self._nodes.by_number if of is None else {}
        lost = [n for n in _names(looked_at) if n not in self._here and self._holders.get(n) not in nodes]
        self._warn_of_loss(lost)
        gone = {name.cell for name in lost}
        return cells._replace(rests={cell: left for cell, left in cells.rests.items() if cell not in gone})

    # ---- warnings

    def _warn_of_loss(self, lost: Sequence[ResidualName]) -> None:
        if lost:
            warnings.warn(
                f"a node was lost with what compression had left of {len(lost)} of the cells that gradients are cut "
                "into: that part of earlier gradients is not added to later ones any more, and the bits are others "
                "than without the loss; go on from a checkpoint to have the same",
                RuntimeWarning,
                stacklevel=2,
            )

    def _warn_of_pieces(self, nodes: int) -> None:
        if not self._warned:
            self._warned = True
            parts = self._compression.parts
            warnings.warn(
                f"gradients are compressed in {parts} cells at most, and there are {nodes} nodes, most of which will "
                f"send pieces of cells, which are not compressed: use compress={{'type': ..., 'parts': {nodes}}}",
                RuntimeWarning,
                stacklevel=2,
            )
