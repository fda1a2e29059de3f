"""The data that crosses the network: packed objects, and batches of which each node gets only its shard.

A batch travels as a manifest, once, and as slices: the samples that a node lacks. A node lays the whole batch
out in memory of which it has only the pages that it was sent samples for: so each sample lies where it would lie on any
other node, which the bits of matrix products depend on, and what is sent later falls into its place.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchopt._machine.cores import usable_cores
from batchopt_workers.data.batch import Batch, Columns, F, Part, Samples
from batchopt_workers.data.items import Items
from batchopt_workers.data.memory import SharedBlock, octets
from batchopt_workers.data.packing import Packed, Placement, pack, unpack
from batchopt_workers.data.structures import tensors_in

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

    def unload(self) -> SharedBlock:
        """Shared memory with the tensors in their places."""
        block = SharedBlock.create(self.nbytes)
        for placement, elements in zip(self.placements, self.tensors, strict=True):
            placement.view(block).copy_(from_bytes(elements, placement.dtype, placement.shape))
        return block


class BatchManifest(NamedTuple):
    """A batch without its samples: how it is laid out, and `whole`, the tensors that have no row a sample, by their
    place among the placements."""

    data: bytes
    placements: tuple[Placement, ...]
    nbytes: int
    whole: list[tuple[int, Bytes]]


class BatchSlice(NamedTuple):
    """Samples `start` up to `stop` of a term: `rows` of tensors, by their place among the placements, and what they
    have in lists."""

    term: int
    start: int
    stop: int
    rows: list[tuple[int, Bytes]]
    lists: PackedBytes | None


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


def _column_tensors(part: Part) -> list[torch.Tensor]:
    """The tensors with a row for each sample."""
    found: list[torch.Tensor] = [*part.criterion_rows.values()]
    for columns in (part.inputs, part.targets):
        if isinstance(columns, Columns):
            found += tensors_in(columns.data)
    return found


def _held_by_datasets(batch: Batch) -> list[torch.Tensor]:
    """The tensors that go with the datasets in the batch."""
    datasets = [part.inputs.data for part in batch.parts if isinstance(part.inputs, Items)]
    return list(pack(datasets).tensors)


def _hollow(part: Part) -> Part:
    """The same with holes in its lists."""

    def emptied(data: F) -> F:
        return replace(data, data=[None] * part.size) if isinstance(data, Samples) else data

    options = None if part.options is None else [None] * part.size
    targets = None if part.targets is None else emptied(part.targets)
    return replace(part, inputs=emptied(part.inputs), targets=targets, options=options)


def _listed(part: Part, samples: range) -> tuple[Any, Any, Any]:
    """Return the `samples` of the lists among inputs, targets and options; None in place of tensors."""
    inputs, targets = (
        list(data.data[samples.start : samples.stop]) if isinstance(data, Samples) else None
        for data in (part.inputs, part.targets)
    )
    return inputs, targets, None if part.options is None else list(part.options[samples.start : samples.stop])


@dataclass(frozen=True)
class SendableBatch:
    """A batch that can be sent in parts: its manifest, and where among the placements the tensors of each term are.
    `digest`: of all that is sent, if somebody has asked for it."""

    batch: Batch
    manifest: BatchManifest
    columns: tuple[dict[int, torch.Tensor], ...]
    digest: bytes | None = None

    @classmethod
    def of(cls, batch: Batch) -> SendableBatch:
        """Raises what pickling the batch raises; samples in lists are pickled when they are sent."""
        packed = pack(Batch(tuple(map(_hollow, batch.parts))))
        index = {id(tensor): i for i, tensor in enumerate(packed.tensors)}
        held = _held_by_datasets(batch)  # which may read any row of them
        for tensor in held:
            index.pop(id(tensor), None)
        columns = tuple(
            {index[id(tensor)]: tensor for tensor in _column_tensors(part) if id(tensor) in index}
            for part in batch.parts
        )
        sent_in_rows = {i for of_term in columns for i in of_term}
        whole = [(i, to_bytes(tensor)) for i, tensor in enumerate(packed.tensors) if i not in sent_in_rows]
        return cls(batch, BatchManifest(packed.data, packed.placements, packed.nbytes, whole), columns)

    @classmethod
    def after(cls, before: SendableBatch | None, batch: Batch) -> SendableBatch:
        """`before` itself, if this is the same batch for the third time or more: the first time there is no digest to
        compare with, so that batches that do not come again cost none."""
        if before is None or _identity(before.batch) != _identity(batch):
            return cls.of(batch)
        packed = pack(batch)
        head = packed.data + repr(packed.placements).encode()
        found = digest([np.frombuffer(head, np.uint8), *map(to_bytes, packed.tensors)])
        return before if before.digest == found else replace(cls.of(batch), digest=found)

    def slices(self, samples: range) -> Iterator[BatchSlice]:
        """Yield the slices for `samples`, numbered through all terms. Raises what pickling raises."""
        for term, part in self.batch.numbering.split(samples):
            rows = [(i, to_bytes(tensor[part.start : part.stop])) for i, tensor in self.columns[term].items()]
            lists = _listed(self.batch.parts[term], part)
            packed_bytes = PackedBytes.of(pack(lists)) if any(found is not None for found in lists) else None
            if rows or packed_bytes is not None:  # items are read there
                yield BatchSlice(term, part.start, part.stop, rows, packed_bytes)


class BatchBuffer:
    """A node's memory for a batch, of which it has some samples."""

    def __init__(self, manifest: BatchManifest, before: BatchBuffer | None = None) -> None:
        """In the memory of the batch `before`, if that was laid out the same."""
        self.manifest = manifest
        is_alike = before is not None and before.manifest.placements == manifest.placements
        self.block: SharedBlock = (
            before.block if before and is_alike else SharedBlock.create(manifest.nbytes, sparse=True)
        )
        for i, elements in manifest.whole:
            self._put(i, slice(None), elements)

    def fill(self, part: BatchSlice) -> None:
        """Put the rows of a slice into their places. Raises `MemoryError`."""
        for i, elements in part.rows:
            self._put(i, slice(part.start, part.stop), elements)

    def _put(self, i: int, rows: slice, elements: Bytes) -> None:
        placement = self.manifest.placements[i]
        tensor = placement.view(self.block)
        place = tensor[rows] if tensor.dim() else tensor
        if not place.numel():
            return
        extent = 1 + sum((size - 1) * stride for size, stride in zip(place.shape, place.stride(), strict=True))
        self.block.reserve(placement.offset + _offset(tensor, rows), extent * place.element_size())
        place.copy_(from_bytes(elements, placement.dtype, place.shape))


def _offset(tensor: torch.Tensor, rows: slice) -> int:
    """Bytes before the first of `rows`."""
    return (rows.start or 0) * tensor.stride(0) * tensor.element_size() if tensor.dim() else 0


def lacking(held: Sequence[range], wanted: range) -> list[range]:
    """Return the parts of `wanted` that are in none of the ranges `held`."""
    missing, at = [], wanted.start
    for have in sorted(held, key=lambda have: have.start):
        if have.start < wanted.stop and have.stop > at:
            if have.start > at:
                missing.append(range(at, have.start))
            at = have.stop
    if at < wanted.stop:
        missing.append(range(at, wanted.stop))
    return missing
