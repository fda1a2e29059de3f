"""What compression has left of the gradients of cells: on a node, and in the parent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

import torch

from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.answers import Partial
from batchopt._mapreduce.compression import Compressed, DoesNotFit, compress
from batchopt.backends.ray.messages import Cells, PartialMessage, ResidualName, ResidualsMessage
from batchopt.backends.ray.transfer import Bytes, from_bytes, to_bytes
from batchopt_workers.tree import Node


class ResidualStore:
    """The residuals of some cells, each under its name: those that an evaluation begins with, and those that it leaves,
    until it is known which of them count. None is written again, so another thread may read."""

    def __init__(self) -> None:
        self._held: Mapping[ResidualName, torch.Tensor] = {}

    def __contains__(self, name: ResidualName) -> bool:
        return name in self._held

    def __getitem__(self, name: ResidualName) -> torch.Tensor:
        return self._held[name]

    def add(self, residuals: Mapping[ResidualName, torch.Tensor]) -> None:
        """Hold these, too."""
        self._held = {**self._held, **residuals}

    def keep(self, names: Collection[ResidualName]) -> None:
        """Hold none but these."""
        self._held = {name: residual for name, residual in self._held.items() if name in names}

    def begin(self, cells: Cells, sent: Mapping[int, Bytes], dtype: torch.dtype) -> None:
        """Hold what this evaluation may need, and what it has left so far; `sent`: residuals that were somewhere
        else, by cell."""
        self.keep({*cells.kept, *(name for name in self._held if name.evaluation == cells.evaluation)})
        found = {cell: from_bytes(elements, dtype, (-1,)).clone() for cell, elements in sent.items()}
        self.add({ResidualName(cell, cells.residuals[cell]): residual for cell, residual in found.items()})

    def compress(self, cell: int, gradient: torch.Tensor, cells: Cells) -> Compressed | None:
        """Compress the gradient of a cell, and hold what is left of it; None for one that is not finite. Raises
        `DoesNotFit`, and `KeyError` if the residual of the cell is somewhere else."""
        before = cells.before(cell)
        found = compress(cells.compression, gradient, before and self._held[before], cells.number)
        if found is not None and found.residual is not None:
            self.add({ResidualName(cell, cells.evaluation): found.residual})
        return found

    def message(self, place: Node, partial: Partial, cells: Cells | None) -> PartialMessage:
        """The message of a partial. A cell is compressed, unless its residual is somewhere else, or the parent has to
        see what is wrong with it."""
        found = None
        if cells is not None and place.level == cells.level:
            with suppress(KeyError, DoesNotFit), torch_threads(1):
                found = self.compress(place.position, partial.gradient, cells)
        gradient = to_bytes(partial.gradient if found is None else found.code)
        return PartialMessage(
            *place, partial.losses, gradient, to_bytes(partial.changes), partial.used, found is not None
        )

    def of(self, names: Iterable[ResidualName]) -> ResidualsMessage:
        """What is held under these names, as a message."""
        held = self._held
        return ResidualsMessage({name: to_bytes(held[name]) if name in held else None for name in names})
