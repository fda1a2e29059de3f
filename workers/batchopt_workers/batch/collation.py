"""Pieces of a batch that were read and collated, kept while the batch and its cut stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.packing import assemble, taken_apart
from batchopt_workers.wire.structures import same_values

# A term's index, and the samples of it that were collated together.
Key = tuple[int, int, int]


class _Kept(NamedTuple):
    """A collated piece, split up: `data` is the pickled structure, so that changes by the user's code do not affect the
    next use. `versions` and `copies` tell whether the first use has written its tensors."""

    data: bytes
    tensors: list[torch.Tensor]
    versions: list[int]
    copies: list[torch.Tensor]

    def fresh(self) -> Any:
        """Return the piece with new leaves."""
        return assemble(self.data, [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors])

    @property
    def is_written(self) -> bool:
        """Tell whether its tensors are not what they were."""
        same = all(map(same_values, self.tensors, self.copies))  # there are none after the first use
        return not same or [tensor._version for tensor in self.tensors] != self.versions


class Collation:
    """The collated pieces of one batch in one cut: each is made once, or twice where it may be needed only once; unless
    it cannot be pickled, or is written."""

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._pieces: dict[Key, _Kept | None] = {}  # None: made each time
        self._used: list[Key] = []
        self._seen: set[Key] = set()

    def of(self, key: Key, collate: Callable[[], Any], keeps: bool | None = None) -> Any:
        """Return these samples, collated now or before. `keeps` None: they are kept from the second time on."""
        if not self._keeps or keeps is False or (keeps is None and key not in self._seen):
            self._seen.add(key)
            return collate()
        if key not in self._pieces:
            made = collate()
            self._pieces[key] = _kept(made)
            self._used.append(key)
            return made
        kept = self._pieces[key]
        if kept is None:
            return collate()
        self._used.append(key)
        return kept.fresh()

    def check(self) -> None:
        """Drop pieces that the last chunk has written."""
        for key in self._used:
            kept = self._pieces[key]
            if kept is not None:
                self._pieces[key] = None if kept.is_written else kept._replace(copies=[])
        self._used = []

    def forget(self) -> None:
        """Drop the pieces of a chunk that has failed: it is unknown what it has written."""
        for key in self._used:
            self._pieces[key] = None
        self._used = []


def _kept(made: Any) -> _Kept | None:
    try:
        data, tensors = taken_apart(made)
    except Exception as error:  # whatever the user's classes raise
        let_through(error)
        return None
    if not all(type(t) is torch.Tensor and t.layout is torch.strided and t.is_leaf and not vars(t) for t in tensors):
        return None
    own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    return _Kept(data, own, [tensor._version for tensor in own], [tensor.detach().clone() for tensor in own])
