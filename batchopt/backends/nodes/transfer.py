"""The data that crosses the network: packed objects, and batches of which each node is sent the rows that it needs.

A node has an ordinary batch, whose parts have only the rows of its share; if its share grows, it is sent the missing
rows, and joins them. The program is sent completely when a node starts, and later only its changes.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchopt._machine.cores import usable_cores
from batchopt._program.program import PickledProgram
from batchopt._program.unpicklable import sending
from batchopt.backends.base import Prepared
from batchopt_workers.data.batch import Batch, Part, Samples
from batchopt_workers.data.items import Items
from batchopt_workers.data.memory import SharedBlock, octets
from batchopt_workers.data.packing import Packed, Placement, assemble, copy_into, pack, unpack
from batchopt_workers.data.structures import tensors_in
from batchopt_workers.map.program import Program
from batchopt_workers.map.weighting import Weighting

Bytes = npt.NDArray[np.uint8]
# Size in bytes of the blocks of a digest.
BLOCK = 2**22


def to_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the elements in row-major order; a view if they are stored so."""
    flat: Bytes = octets(tensor).numpy()
    return flat


def from_bytes(elements: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Invert `to_bytes`: return a read-only view, or a copy if the address is not aligned."""
    if not elements.size:  # an empty array may have any stride
        return torch.empty(0, dtype=dtype, device="cpu").view([0 if length == -1 else length for length in shape])
    if elements.ctypes.data % dtype.itemsize:  # reading complex numbers there can crash the process
        elements = elements.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # received memory is read-only
        return torch.from_numpy(elements).view(dtype).view(tuple(shape))


def digest(arrays: Iterable[Bytes]) -> bytes:
    """Return the SHA-256 of all elements."""
    blocks = [array[at : at + BLOCK] for array in arrays for at in range(0, max(array.size, 1), BLOCK)]

    def of_block(block: Bytes) -> bytes:
        return hashlib.sha256(block.data).digest()  # processors have instructions for it

    if len(blocks) < 2:
        return b"".join(map(of_block, blocks))
    with ThreadPoolExecutor(usable_cores()) as threads:
        return hashlib.sha256(b"".join(threads.map(of_block, blocks))).digest()


class PackedBytes(NamedTuple):
    """A packed object to be sent, its tensors as bytes."""

    data: bytes
    placements: tuple[Placement, ...]
    nbytes: int
    tensors: list[Bytes]

    @classmethod
    def of(cls, packed: Packed) -> PackedBytes:
        """Return the packed object with its tensors as bytes."""
        return cls(packed.data, packed.placements, packed.nbytes, [to_bytes(tensor) for tensor in packed.tensors])

    def packed(self) -> Packed:
        """Invert `of`: tensors are read-only views of the received bytes."""
        pairs = zip(self.tensors, self.placements, strict=True)
        tensors = tuple([from_bytes(elements, placement.dtype, placement.shape) for elements, placement in pairs])
        return Packed(self.data, tensors, self.placements, self.nbytes)

    def unpacked(self, parameters: Sequence[torch.Tensor] = ()) -> Any:
        """Return the object that was packed, its tensors in new memory."""
        return assemble(self.data, made(self.placements, self.tensors), parameters)


def made(placements: Sequence[Placement], elements: Sequence[Bytes]) -> list[torch.Tensor]:
    """Return the tensors of a packed object, in new memory."""
    tensors = []
    for placement, of_one in zip(placements, elements, strict=True):
        memory = placement.empty()
        copy_into(memory, from_bytes(of_one, placement.dtype, placement.shape))
        tensors.append(placement.dressed(memory))
    return tensors


def copied(batch: Batch) -> Batch:
    """Return a copy of the batch. Raises what pickling it raises."""
    packed = pack(batch)
    block = SharedBlock.create(packed.nbytes)
    packed.place(block)
    copy: Batch = unpack(packed.data, packed.placements, block)
    return copy


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
        head = packed.data + repr(packed.placements).encode()
        found = digest([np.frombuffer(head, np.uint8), *map(to_bytes, packed.tensors)])
        return before if before.digest == found else cls(batch, found)


class SentRows(NamedTuple):
    """The rows of a batch that a node has: those of some samples of each term; without terms: none."""

    batch: Batch
    terms: tuple[range, ...]

    @classmethod
    def of(cls, batch: Batch, samples: range) -> SentRows:
        """Return the rows needed for `samples`, numbered through all terms."""
        found = dict(batch.numbering.split(samples))
        return cls(batch, tuple([part.rows_for(found.get(i, range(0))) for i, part in enumerate(batch.parts)]))

    def lacks(self, wanted: SentRows) -> bool:
        """Tell whether any of the `wanted` rows is not among them."""
        if not self.terms:
            return True
        pairs = zip(wanted.terms, self.terms, strict=True)
        return any(want and not (have.start <= want.start and want.stop <= have.stop) for want, have in pairs)

    def extended(self, wanted: SentRows) -> SentRows | None:
        """Return these with the `wanted` ones; None if others lie between, or there are none."""
        if not any(self.terms):
            return None
        found = []
        for have, want in zip(self.terms, wanted.terms, strict=True):
            if have and want and (want.start > have.stop or have.start > want.stop):
                return None
            both = [rows for rows in (have, want) if rows] or [have]
            found.append(range(min(rows.start for rows in both), max(rows.stop for rows in both)))
        return SentRows(self.batch, tuple(found))

    def packed(self) -> PackedBytes:
        """Return the batch with these rows, packed. Raises `TypeError` for one that cannot be sent."""
        pairs = zip(self.batch.parts, self.terms, strict=True)
        return self._packed(Batch(tuple([part.cut(rows) for part, rows in pairs])))

    def packed_without(self, held: SentRows) -> PackedBytes:
        """Return the rows that are not `held`, packed: parts of terms, with their numbers. Raises what `packed`
        raises."""
        more = []
        for term, (rows, have) in enumerate(zip(self.terms, held.terms, strict=True)):
            for lacking in (range(rows.start, have.start), range(max(have.stop, rows.start), rows.stop)):
                if lacking:
                    more.append((term, replace(self.batch.parts[term].cut(lacking), weighting=Weighting("sum", 0))))
        return self._packed(more)

    def _packed(self, sent: object) -> PackedBytes:
        with sending("the batch", *(part.inputs.data for part in self.batch.parts)):
            return PackedBytes.of(pack(sent))


def with_rows(batch: Batch, more: Iterable[tuple[int, Part]]) -> Batch:
    """Return the batch with these rows, too."""
    parts = [*batch.parts]
    for term, part in more:
        parts[term] = parts[term].joined(part)
    return Batch(tuple(parts))


class ProgramVersion(NamedTuple):
    """A version of the program: everything except its tensors, and the `elements` of these, with a digest of each."""

    data: bytes
    placements: tuple[Placement, ...]
    digests: tuple[bytes, ...]
    elements: tuple[Bytes, ...]


class ProgramUpdate(NamedTuple):
    """The part of a version that a node lacks: all of it or, if `data` is None, the elements of some tensors, by
    place."""

    data: bytes | None
    placements: tuple[Placement, ...]
    elements: dict[int, Bytes]


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
        # version counters would not do: `.data` and batch normalisation bypass them
        digests = tuple(digest([to_bytes(tensor)]) for tensor in packed.tensors)
        if before is not None and packed.data is before.data and digests == before.digests:
            return before
        known = {} if before is None else dict(zip(before.digests, before.elements, strict=True))
        pairs = zip(digests, packed.tensors, strict=True)
        elements = tuple(known[key] if key in known else to_bytes(tensor).copy() for key, tensor in pairs)
        return ProgramVersion(packed.data, packed.placements, digests, elements)


def update_for(version: ProgramVersion, held: ProgramVersion | None) -> ProgramUpdate:
    """Return the update for a node that has the version `held`."""
    is_same = held is not None and held.data is version.data
    changed = {
        i: elements
        for i, elements in enumerate(version.elements)
        if held is None or not is_same or held.digests[i] != version.digests[i]
    }
    return ProgramUpdate(None if is_same else version.data, version.placements, changed)


def write(found: ProgramUpdate, tensors: Sequence[torch.Tensor]) -> None:
    """Write the elements of an update that has nothing else."""
    with torch.no_grad():
        for i, elements in found.elements.items():
            copy_into(tensors[i], from_bytes(elements, found.placements[i].dtype, found.placements[i].shape))
