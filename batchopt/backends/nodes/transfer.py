"""The data that crosses the network: the program, and batches of which each node is sent the rows that it needs.

A node has an ordinary batch, whose parts have only the rows of its share; if its share grows, it is sent the missing
rows, and joins them. The program is sent completely when a node starts, and later only its changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from batchopt._machine.cores import usable_cores
from batchopt._program.program import PickledProgram
from batchopt._program.unpicklable import sending
from batchopt.backends.base import Prepared
from batchopt_workers.batch.batch import Batch, Samples
from batchopt_workers.batch.items import Items
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.evaluate.program import Program
from batchopt_workers.wire.memory import octets
from batchopt_workers.wire.packing import Packed, Placement, assemble, copy_into, pack
from batchopt_workers.wire.structures import tensors_in

# Size in bytes of the blocks of a digest.
BLOCK = 2**22


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return the SHA-256 of all elements."""
    arrays = [octets(tensor).numpy() for tensor in tensors]
    blocks = [array[at : at + BLOCK] for array in arrays for at in range(0, max(array.size, 1), BLOCK)]
    if len(blocks) < 2:
        return b"".join(hashlib.sha256(block.data).digest() for block in blocks)
    with ThreadPoolExecutor(usable_cores()) as threads:  # processors have instructions for it
        return hashlib.sha256(b"".join(threads.map(lambda block: hashlib.sha256(block.data).digest(), blocks))).digest()


def made(placements: Sequence[Placement], elements: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a packed object, in new memory."""
    tensors = []
    for placement, of_one in zip(placements, elements, strict=True):
        memory = placement.empty()
        copy_into(memory, of_one)
        tensors.append(placement.dressed(memory))
    return tensors


def unpacked(packed: Packed, parameters: Sequence[torch.Tensor] = ()) -> Any:
    """Return the object that was packed, its tensors in new memory."""
    return assemble(packed.data, made(packed.placements, packed.tensors), parameters)


def _identity(batch: Batch) -> list[Any]:
    """Return a key that is equal for batches of the same objects, whatever their content."""
    found: list[Any] = []
    tensors: list[torch.Tensor] = []
    for part in batch.parts:
        for data in (part.inputs, part.targets):
            if isinstance(data, Samples):
                found += map(id, data.data)
            elif isinstance(data, Items):
                found.append(id(data.data))
            elif data is not None:
                tensors += tensors_in(data.data)
        found += map(id, part.options or ())
    return found + [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


@dataclass(frozen=True)
class KnownBatch(Prepared):
    """A batch of which each node is sent what it needs. `digest`: of all its content, if it was computed."""

    digest: bytes | None = None

    @classmethod
    def after(cls, before: KnownBatch | None, batch: Batch) -> KnownBatch:
        """Return `before` itself, if this is the same batch for the third time or more: a digest is computed only when
        the same objects come again, so that batches that come once need none."""
        if before is None or _identity(before.batch) != _identity(batch):
            return cls(batch)
        packed = pack(batch)
        head = bytearray(packed.data + repr(packed.placements).encode())
        found = digest([torch.frombuffer(head, dtype=torch.uint8), *packed.tensors])
        return before if before.digest == found else cls(batch, found)


class SentRows(NamedTuple):
    """The rows of a batch that a node has: those of some samples of each term."""

    batch: Batch
    terms: tuple[range, ...]

    @classmethod
    def of(cls, batch: Batch, samples: range, held: SentRows | None = None) -> SentRows:
        """Return the rows needed for `samples`, numbered through all terms: `held` itself, if they are among those, or
        both, unless others lie between."""
        found = dict(batch.numbering.split(samples))
        wanted = cls(batch, tuple([part.rows_for(found.get(i, range(0))) for i, part in enumerate(batch.parts)]))
        if held is None or held.batch is not batch:
            return wanted
        return held if held.has(wanted) else held._extended(wanted) or wanted

    def has(self, wanted: SentRows) -> bool:
        """Tell whether all of the `wanted` rows are among them."""
        pairs = zip(wanted.terms, self.terms, strict=True)
        return all(not want or (have.start <= want.start and want.stop <= have.stop) for want, have in pairs)

    def _extended(self, wanted: SentRows) -> SentRows | None:
        found = []
        for have, want in zip(self.terms, wanted.terms, strict=True):
            if have and want and (want.start > have.stop or have.start > want.stop):
                return None
            both = [rows for rows in (have, want) if rows] or [have]
            found.append(range(min(rows.start for rows in both), max(rows.stop for rows in both)))
        return SentRows(self.batch, tuple(found))

    def since(self, held: SentRows | None) -> RowsUpdate:
        """Return what a node lacks that has the rows `held`. Raises `TypeError` for what cannot be sent."""
        is_more = held is not None and held.batch is self.batch and any(held.terms) and self.has(held)
        with sending("the batch", *(part.inputs.data for part in self.batch.parts)):
            if held is None or not is_more:
                pairs = zip(self.batch.parts, self.terms, strict=True)
                return RowsUpdate(pack(Batch(tuple([part.cut(rows) for part, rows in pairs]))), False)
            more = []
            for term, (rows, have) in enumerate(zip(self.terms, held.terms, strict=True)):
                for lacking in (range(rows.start, have.start), range(max(have.stop, rows.start), rows.stop)):
                    if lacking:
                        part = self.batch.parts[term].cut(lacking)
                        more.append((term, replace(part, weighting=Weighting("sum", 0))))
            return RowsUpdate(pack(more), True)


class RowsUpdate(NamedTuple):
    """A batch that has only a node's rows, packed; or, if `is_more`, parts of terms to be joined to it, with their
    numbers."""

    packed: Packed
    is_more: bool

    def added_to(self, batch: Batch) -> Batch:
        """Return the batch with these rows, too."""
        parts = [*batch.parts]
        for term, part in unpacked(self.packed):
            parts[term] = parts[term].joined(part)
        return Batch(tuple(parts))


class ProgramVersion(NamedTuple):
    """A version of the program: everything except its tensors, and the `elements` of these, with a digest of each."""

    data: bytes
    placements: tuple[Placement, ...]
    digests: tuple[bytes, ...]
    elements: tuple[torch.Tensor, ...]

    def since(self, held: ProgramVersion | None) -> ProgramUpdate:
        """Return the update for a node that has the version `held`."""
        if held is None or held.data is not self.data:
            return ProgramUpdate(self.data, self.placements, dict(enumerate(self.elements)))
        changed = [i for i, (now, before) in enumerate(zip(self.digests, held.digests, strict=True)) if now != before]
        return ProgramUpdate(None, self.placements, {i: self.elements[i] for i in changed})


class ProgramUpdate(NamedTuple):
    """The part of a version that a node lacks: all of it or, if `data` is None, the elements of some tensors, by
    place."""

    data: bytes | None
    placements: tuple[Placement, ...]
    elements: dict[int, torch.Tensor]

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the elements to the program's tensors."""
        for i, elements in self.elements.items():
            copy_into(tensors[i], elements)


class ProgramVersions:
    """The user's program as of the start of each step."""

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises `TypeError` for a program that cannot be sent."""
        self._source = PickledProgram(program, parameters)
        self.latest = self._version(None)

    def follow(self, program: Program) -> None:
        """Take over the user's changes. Raises `TypeError` for a program that can no longer be sent."""
        self._source.resync(program)
        self.latest = self._version(self.latest)

    def _version(self, before: ProgramVersion | None) -> ProgramVersion:
        """Return the current version, which is `before` if nothing was changed; the elements of a tensor are copied
        once."""
        packed = self._source.packed
        # version counters would not do: `.data` and batch normalization bypass them
        digests = tuple(digest([tensor]) for tensor in packed.tensors)
        if before is not None and packed.data is before.data and digests == before.digests:
            return before
        known = {} if before is None else dict(zip(before.digests, before.elements, strict=True))
        pairs = zip(digests, packed.tensors, strict=True)
        elements = tuple(known[key] if key in known else tensor.detach().clone() for key, tensor in pairs)
        return ProgramVersion(packed.data, packed.placements, digests, elements)
