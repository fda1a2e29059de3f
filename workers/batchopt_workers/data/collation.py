"""A cache of collated samples, kept while the batch and its cut stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from batchopt_workers.data.packing import assemble, taken_apart
from batchopt_workers.data.structures import same_values
from batchopt_workers.process.interrupts import let_through

# Bytes that a worker may keep; the size of the batch itself, if that is larger.
LEAST = 2**26

# A term's index, and the samples of it that were collated together.
Key = tuple[int, int, int]


@dataclass
class _Kept:
    """A collated piece, split up: `data` is the pickled structure, so that changes by user code do not affect the next
    use; `tensors` share the memory, with a flag for those that require grad."""

    data: bytes
    tensors: list[tuple[torch.Tensor, bool]]
    nbytes: int  # taken from the room for all pieces
    versions: list[int] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)  # until one forward was seen not to write

    def begin(self) -> None:
        self.versions = [tensor._version for tensor, _ in self.tensors]

    def is_written(self) -> bool:
        """Tell whether it was written since `begin`, by the version counters and by any copies."""
        now = [tensor._version for tensor, _ in self.tensors]
        same = all(same_values(tensor, copy) for (tensor, _), copy in zip(self.tensors, self.copies, strict=False))
        return now != self.versions or not same

    @property
    def plain(self) -> list[torch.Tensor]:
        """The tensors, as they were collated."""
        return [tensor for tensor, _ in self.tensors]

    def fresh(self) -> Any:
        """Return the piece with new leaves."""
        leaves = [tensor.detach().requires_grad_(requires_grad) for tensor, requires_grad in self.tensors]
        return assemble(self.data, leaves)


def _can_be_kept(tensor: torch.Tensor) -> bool:
    """Tell whether writes to it can be detected."""
    plain = tensor.layout is torch.strided and tensor.is_leaf and not tensor.is_inference() and not tensor.is_meta
    return type(tensor) is torch.Tensor and plain and not vars(tensor)


def _random_states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    kind, key, *rest = np.random.get_state()
    torch_states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)]
    return torch_states, kind, np.asarray(key).tobytes(), rest, random.getstate()


class Collation:
    """A cache of the collated pieces of one batch in one cut, as this worker evaluates them.

    A piece is kept from its second use on, so that a batch that is evaluated once causes no overhead. It is not kept if
    its tensors are written, if its collate function draws random numbers (later draws would change), or if it cannot be
    pickled; nor beyond `LEAST` bytes, or the size of the batch's `tensors` if that is larger. Samples of a dataset are
    kept from the first time on, either all or none; samples that another worker had are read only if those read here
    are still the same.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), keeps: bool = True) -> None:
        """`tensors`: those of the batch. `keeps` False: nothing is kept."""
        self._keeps = keeps
        self._own: set[int] = set()  # addresses of the batch's memory
        nbytes = 0
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._own.add(tensor.untyped_storage().data_ptr())
                nbytes += tensor.numel() * tensor.element_size()
        self._room = max(LEAST, nbytes)
        self._pieces: dict[Key, _Kept | None] = {}  # None: used once
        self._never: set[Key] = set()
        self._used: list[Key] = []
        self._read: tuple[Key, Callable[[], Any]] | None = None  # the first piece of a dataset that was kept
        self._reads_again = False

    def settle(self) -> None:
        """Begin an evaluation: whatever is read of a dataset from here on, another worker had."""
        self._reads_again = self._read is not None

    def of(self, key: Key, collate: Callable[[], Any], cache: bool | None = None) -> Any:
        """Return these samples, collated now or before. `cache`: keep them regardless of size; None: keep them from the
        second time on, if there is room."""
        if key in self._never or cache is False or not self._keeps:
            return collate()
        if key not in self._pieces and cache is None:
            self._pieces[key] = None
            return collate()
        self._used.append(key)
        kept = self._pieces.get(key)
        if kept is not None:
            kept.begin()
            return kept.fresh()
        before = _random_states()
        if self._reads_again and self._read is not None:
            self._check_read(*self._read)
        made = collate()
        kept = self._keep(made, unlimited=cache is True) if before == _random_states() else None
        if kept is None:
            self._drop(key)
        else:
            self._pieces[key] = kept
            self._room -= kept.nbytes
            if cache and self._read is None:
                self._read = key, collate
        return made

    def _keep(self, made: Any, unlimited: bool) -> _Kept | None:
        try:
            data, tensors = taken_apart(made)
        except Exception as error:  # whatever the user's classes raise: then it is collated each time
            let_through(error)
            return None
        if not all(map(_can_be_kept, tensors)):
            return None
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        nbytes = sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in self._own)
        nbytes += len(data)
        nbytes = 0 if unlimited else nbytes
        if nbytes > self._room:
            return None
        kept = _Kept(data, [(tensor.detach(), tensor.requires_grad) for tensor in tensors], nbytes)
        kept.copies = [tensor.clone() for tensor, _ in kept.tensors]
        kept.begin()
        return kept

    def _check_read(self, key: Key, collate: Callable[[], Any]) -> None:
        """Raise `ValueError` if reading the samples again gives a different result."""
        kept, again = self._pieces.get(key), self._keep(collate(), unlimited=True)
        if kept is None:  # it was written here
            self._read = None
        elif again is None or again.data != kept.data or not all(map(same_values, again.copies, kept.plain)):
            raise ValueError(
                "reading the same items again gave different values (they were read again because chunks moved to "
                "another worker): draw from torch's, NumPy's or random's global generator, which are seeded, or from "
                "one seeded with the index; or leave `chunk_size` out, so that each worker reads its samples once; or "
                "make tensors of the dataset before"
            )

    def _drop(self, key: Key) -> None:
        kept = self._pieces.pop(key, None)
        self._never.add(key)
        self._room += 0 if kept is None else kept.nbytes

    def check(self) -> None:
        """Drop cached pieces that the last chunk modified."""
        for key in self._used:
            kept = self._pieces.get(key)
            if kept is not None and kept.is_written():
                self._drop(key)
            elif kept is not None:
                kept.copies = []
        self._used = []

    def forget(self) -> None:
        """Drop the pieces of the chunk, which has failed: it is unknown what it has written."""
        for key in self._used:
            self._drop(key)
        self._used = []
