"""The data that crosses the network: packed objects, and batches of which each node is sent the rows that it needs.

A node has an ordinary batch, whose parts have the rows of its share alone; where its share has grown, it is sent the
others, and puts them together. The program is sent whole when a node starts, and later what has changed of it.
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
from batchopt_workers.map.evaluate import Program
from batchopt_workers.map.weighting import Weighting

Bytes = npt.NDArray[np.uint8]
# Bytes of which a digest is made at once.
BLOCK = 2**22


def to_bytes(tensor: torch.Tensor) -> Bytes:
    """The elements in row-major order; a view where they lie so."""
    flat: Bytes = octets(tensor).numpy()
    return flat


def from_bytes(elements: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `to_bytes`: a view, which is only to be read; a copy of what came to lie at an odd address."""
    if not elements.size:  # which NumPy may give any stride
        return torch.empty(0, dtype=dtype, device="cpu").view([0 if length == -1 else length for length in shape])
    if elements.ctypes.data % dtype.itemsize:  # reading complex numbers there can end the process
        elements = elements.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what came over the network cannot be written
        return torch.from_numpy(elements).view(dtype).view(tuple(shape))


def digest(arrays: Iterable[Bytes]) -> bytes:
    """SHA-256 of all elements."""
    blocks = [array[at : at + BLOCK] for array in arrays for at in range(0, max(array.size, 1), BLOCK)]

    def of_block(block: Bytes) -> bytes:
        return hashlib.sha256(block.data).digest()  # which processors have instructions for

    if len(blocks) < 2:
        return b"".join(map(of_block, blocks))
    with ThreadPoolExecutor(usable_cores()) as threads:
        return hashlib.sha256(b"".join(threads.map(of_block, blocks))).digest()


class PackedBytes(NamedTuple):
    """A packed object on its way, its tensors as bytes."""

    data: bytes
    placements: tuple[Placement, ...]
    nbytes: int
    tensors: list[Bytes]

    @classmethod
    def of(cls, packed: Packed) -> PackedBytes:
        """The packed object with its tensors as bytes."""
        return cls(packed.data, packed.placements, packed.nbytes, [to_bytes(tensor) for tensor in packed.tensors])

    def packed(self) -> Packed:
        """The inverse of `of`: tensors are views of what came, which are only to be read."""
        pairs = zip(self.tensors, self.placements, strict=True)
        tensors = tuple([from_bytes(elements, placement.dtype, placement.shape) for elements, placement in pairs])
        return Packed(self.data, tensors, self.placements, self.nbytes)

    def unpacked(self, parameters: Sequence[torch.Tensor] = ()) -> Any:
        """The object that was packed, its tensors in memory of their own."""
        return assemble(self.data, made(self.placements, self.tensors), parameters)


def made(placements: Sequence[Placement], elements: Sequence[Bytes]) -> list[torch.Tensor]:
    """The tensors of a packed object, in memory of their own."""
    tensors = []
    for placement, of_one in zip(placements, elements, strict=True):
        memory = placement.empty()
        copy_into(memory, from_bytes(of_one, placement.dtype, placement.shape))
        tensors.append(placement.dressed(memory))
    return tensors


def copied(batch: Batch) -> Batch:
    """The same in memory of its own. Raises what pickling the batch raises."""
    packed = pack(batch)
    block = SharedBlock.create(packed.nbytes)
    packed.place(block)
    copy: Batch = unpack(packed.data, packed.placements, block)
    return copy


def _identity(batch: Batch) -> list[Any]:
    """Equal for batches of the same objects, whatever they have in them now."""
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
    """A batch of which each node is sent what it needs. `digest`: of all that is in it, if somebody has asked for
    it."""

    digest: bytes | None = None

    @classmethod
    def after(cls, before: KnownBatch | None, batch: Batch) -> KnownBatch:
        """`before` itself, if this is the same batch for the third time or more: the first time there is no digest to
        compare with, so that batches that do not come again cost none."""
        if before is None or _identity(before.batch) != _identity(batch):
            return cls(batch)
        packed = pack(batch)
        head = packed.data + repr(packed.placements).encode()
        found = digest([np.frombuffer(head, np.uint8), *map(to_bytes, packed.tensors)])
        return before if before.digest == found else cls(batch, found)


class SentRows(NamedTuple):
    """The rows of a batch that a node has: those of some samples of each term; no terms: nothing of the batch."""

    batch: Batch
    terms: tuple[range, ...]

    @classmethod
    def of(cls, batch: Batch, samples: range) -> SentRows:
        """The rows that it needs for `samples`, numbered through all terms."""
        found = dict(batch.numbering.split(samples))
        return cls(batch, tuple([part.rows_for(found.get(i, range(0))) for i, part in enumerate(batch.parts)]))

    def lacks(self, wanted: SentRows) -> bool:
        """Tell whether any of the `wanted` rows is not among them."""
        if not self.terms:
            return True
        pairs = zip(wanted.terms, self.terms, strict=True)
        return any(want and not (have.start <= want.start and want.stop <= have.stop) for want, have in pairs)

    def extended(self, wanted: SentRows) -> SentRows | None:
        """Return these with the `wanted` ones; None where others lie between, or there are none."""
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
        """The batch with these rows. Raises `TypeError` for one that cannot be sent."""
        pairs = zip(self.batch.parts, self.terms, strict=True)
        return self._packed(Batch(tuple([part.cut(rows) for part, rows in pairs])))

    def packed_without(self, held: SentRows) -> PackedBytes:
        """The rows that are not among those `held`: parts of terms, with their numbers. Raises what `packed` does."""
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
    """A program as of one moment: all but its tensors, and `elements` of these, with a digest of each."""

    data: bytes
    placements: tuple[Placement, ...]
    digests: tuple[bytes, ...]
    elements: tuple[Bytes, ...]


class ProgramUpdate(NamedTuple):
    """The part of a version that a node lacks: all of it or, where `data` is None, the elements of some tensors, by
    place."""

    data: bytes | None
    placements: tuple[Placement, ...]
    elements: dict[int, Bytes]


class ProgramVersions:
    """The program of the user as of the start of each step."""

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises `TypeError` for a program that cannot be sent."""
        self._source = PickledProgram(program, parameters)
        self.latest = self._version(None)

    def follow(self, program: Program) -> None:
        """Take over what the user has changed since. Raises `TypeError` for a program that cannot be sent any more."""
        self._source.follow(program)
        self.latest = self._version(self.latest)

    def _version(self, before: ProgramVersion | None) -> ProgramVersion:
        """The present one, which is `before` if nothing was changed; what is in a tensor is copied once."""
        packed = self._source.packed
        # a version counter would not do: `.data` and batch normalisation go past it
        digests = tuple(digest([to_bytes(tensor)]) for tensor in packed.tensors)
        if before is not None and packed.data is before.data and digests == before.digests:
            return before
        known = {} if before is None else dict(zip(before.digests, before.elements, strict=True))
        pairs = zip(digests, packed.tensors, strict=True)
        elements = tuple(known[key] if key in known else to_bytes(tensor).copy() for key, tensor in pairs)
        return ProgramVersion(packed.data, packed.placements, digests, elements)


def update_for(version: ProgramVersion, held: ProgramVersion | None) -> ProgramUpdate:
    """For a node that has the version `held`."""
    is_same = held is not None and held.data is version.data
    changed = {
        i: elements
        for i, elements in enumerate(version.elements)
        if held is None or not is_same or held.digests[i] != version.digests[i]
    }
    return ProgramUpdate(None if is_same else version.data, version.placements, changed)


def write(found: ProgramUpdate, tensors: Sequence[torch.Tensor]) -> None:
    """Write the elements of an update that has no more."""
    with torch.no_grad():
        for i, elements in found.elements.items():
            copy_into(tensors[i], from_bytes(elements, found.placements[i].dtype, found.placements[i].shape))
