"""The cells of compressed evaluations in the parent: who has their residuals, and what nobody has compressed yet.

A node compresses the cells that it has evaluated all of, and keeps what is left; of others it sends the pieces, which
are merged and compressed here. A node that is given a whole cell whose residual is here gets that with it. One that
lacks the residual (it has taken the cell over from another node) sends the cell as it is; then the residual is fetched
from where it is, and the cell is compressed here. So a residual moves with its cell, and the bits are always the same.
Only the residuals on a node that is lost are lost with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.answers import Answer, Partial
from batchopt._mapreduce.compression import Compression, DoesNotFit
from batchopt._mapreduce.reduce import merge_answers
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.alignment import aligned, whole_cells
from batchopt.backends.ray.gather import NodeGather, NodeResiduals
from batchopt.backends.ray.messages import Cells, ResidualName
from batchopt.backends.ray.node import ClusterNode
from batchopt.backends.ray.nodes import Nodes
from batchopt.backends.ray.residuals import ResidualStore
from batchopt.backends.ray.transfer import Bytes, from_bytes, to_bytes
from batchopt_workers.layout import Layout
from batchopt_workers.messages import Cut, Order


def _names(residuals: Mapping[int, int]) -> Iterable[ResidualName]:
    return (ResidualName(*item) for item in residuals.items())


class CellReduce:
    """Compresses what nodes have not, and knows where the residuals of all cells are."""

    def __init__(self, compression: Compression, nodes: Nodes, layout: Layout, fixed_bits: bool) -> None:
        """Gradients lie as in `layout`. Without `fixed_bits` the cut depends on the workers anyway, and there are no
        more cells than nodes."""
        self._compression, self._nodes, self._fixed_bits = compression, nodes, fixed_bits
        self._size, self._dtype = layout.size, layout.sum_dtype
        # by evaluation: which one had left the residual of each cell when it was over
        self._left: dict[int, Mapping[int, int]] = {0: {}}
        self._holders: dict[ResidualName, int] = {}  # the numbers of nodes
        self._here = ResidualStore()
        self._warned = False

    # ---- an evaluation

    def begin(self, evaluation: int, chunks: int, taken: int, kept: int) -> Cells:
        """Begin with the residuals that evaluation `taken` has left. The next one may begin with those of `taken`, of
        `kept`, or of this one."""
        self._left = {number: self._left[number] for number in (0, taken, kept)}
        names = frozenset(name for residuals in self._left.values() for name in _names(residuals))
        self._here.keep(names)
        self._holders = {name: node for name, node in self._holders.items() if name in names}
        compression, nodes = self._compression, len(self._nodes.ready)
        if not self._fixed_bits:
            compression = replace(compression, parts=max(1, min(compression.parts, nodes)))
        elif compression.parts < nodes:
            self._warn_of_pieces(nodes)
        cells = Cells(compression, evaluation, chunks, self._size, self._left[taken], names)
        return self._without(cells, [name for name in _names(cells.residuals) if not self._is_somewhere(name)])

    def aligned(self, orders: Sequence[Order | None], cells: Cells) -> list[Order | None]:
        """The orders, moved so that nodes get whole cells."""
        places = {rank: node.number for node in self._nodes.ready for rank in node.ranks}
        shares = [0 if order is None else order.last - order.first for order in orders]
        order = next(order for order in orders if order is not None)
        found: list[Order | None] = []
        first = 0
        for share in aligned(shares, [places.get(rank) for rank in range(len(orders))], 2**cells.level):
            found.append(order._replace(first=first, last=first + share) if share else None)
            first += share
        return found

    def residuals_for(self, node: ClusterNode, given: Iterable[ChunkRun | None], cells: Cells) -> dict[int, Bytes]:
        """The residuals of whole cells in these runs that the node lacks and that are here."""
        mine = whole_cells([run for run in given if run is not None], 2**cells.level, cells.chunks)
        names = [name for name in map(cells.before, mine) if name is not None and name in self._here]
        return {name.cell: to_bytes(self._here[name]) for name in names if self._holders.get(name) != node.number}

    def finish(self, gather: NodeGather, cells: Cells, cut: Cut) -> list[Answer]:
        """The answers, in which all partials are cells, compressed or not finite. Raises `DoesNotFit`."""
        with torch_threads(1):
            answers = gather.answers()
            partials = merge_answers(answers, cells.chunks, cells.level)
            raw = {place.position for place, _ in partials if place not in gather.compressed}
            cells = self._without(cells, self.fetch(name for name in map(cells.before, raw) if name is not None))
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
        """The evaluation is over, and has left residuals of these cells on nodes of these numbers; -1 is here."""
        if cells.compression.keeps_residual:
            self._holders |= {ResidualName(cell, cells.evaluation): node for cell, node in left.items() if node >= 0}
            self._left[cells.evaluation] = {**cells.residuals, **dict.fromkeys(left, cells.evaluation)}
        else:
            self._left[cells.evaluation] = {}

    # ---- residuals

    def _is_somewhere(self, name: ResidualName) -> bool:
        return name in self._here or self._holders[name] in self._nodes.by_number

    def fetch(self, names: Iterable[ResidualName]) -> list[ResidualName]:
        """Bring residuals here; returns those that are lost with their node."""
        lacking = [name for name in names if name not in self._here]
        listener = NodeResiduals()
        for number in {self._holders[name] for name in lacking}:
            node = self._nodes.by_number.get(number)
            if node is not None:
                of_node = [name for name in lacking if self._holders[name] == number]
                node.ask_for_residuals(of_node)
                listener.asked(node, of_node)
        listener.collect(lambda: self._nodes.pump(listener, math.inf))
        self._here.add({name: from_bytes(found, self._dtype, (-1,)).clone() for name, found in listener.found.items()})
        return [name for name in lacking if name not in self._here]

    def fetch_all(self) -> None:
        """Bring all residuals here: their nodes may end."""
        self.fetch({name for residuals in self._left.values() for name in _names(residuals)})

    def residuals_after(self, evaluation: int) -> dict[int, torch.Tensor]:
        """What an evaluation has left, by cell."""
        names = list(_names(self._left[evaluation]))
        lost = self.fetch(names)
        _warn_of_loss(lost)
        return {name.cell: self._here[name] for name in names if name not in lost}

    def restore(self, evaluation: int, residuals: Mapping[int, torch.Tensor]) -> None:
        """Let this be what an evaluation of that number has left."""
        self._here.add({ResidualName(cell, evaluation): found.clone() for cell, found in residuals.items()})
        self._left[evaluation] = dict.fromkeys(residuals, evaluation)

    def _without(self, cells: Cells, lost: Sequence[ResidualName]) -> Cells:
        """The same without these residuals, which count as zero."""
        _warn_of_loss(lost)
        gone = {name.cell for name in lost}
        return cells._replace(residuals={cell: by for cell, by in cells.residuals.items() if cell not in gone})

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


def _warn_of_loss(lost: Sequence[ResidualName]) -> None:
    if lost:
        warnings.warn(
            f"a node was lost with what compression had left of {len(lost)} of the cells that gradients are cut into: "
            "that part of earlier gradients is not added to later ones any more, and the bits are others than without "
            "the loss; go on from a checkpoint to have the same",
            RuntimeWarning,
            stacklevel=2,
        )
