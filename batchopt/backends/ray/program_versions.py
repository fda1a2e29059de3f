"""The program on its way to other nodes: whole when a node starts, and later what it lacks of the present one.

Tensors are state by a digest of their elements: a node keeps those that it has, wherever they are in the program.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from batchopt._program.program import Source
from batchopt.backends.ray.transfer import Bytes, PackedBytes, digest, from_bytes, to_bytes
from batchopt_workers.evaluate import Program
from batchopt_workers.packing import Packed, Placement, copy_into


class ProgramVersion(NamedTuple):
    """A program as of one moment; `copies` are the elements of those tensors that nodes may lack."""

    packed: Packed
    digests: tuple[bytes, ...]
    copies: dict[bytes, Bytes]


class ProgramUpdate(NamedTuple):
    """What a node lacks of an version: elements by their digest, and all but the tensors, unless that is as before."""

    data: bytes | None
    placements: tuple[Placement, ...]
    digests: tuple[bytes, ...]
    elements: dict[bytes, Bytes]


class ProgramVersions:
    """The program of the user as of the start of each step."""

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises `TypeError` for a program that cannot be sent."""
        self._source = Source(program, parameters)
        self.first = PackedBytes.of(self._source.packed)
        self.latest = ProgramVersion(self._source.packed, _digests(self._source.packed), {})

    def follow(self, program: Program) -> None:
        """Take over what the user has changed since. Raises `TypeError` for a program that cannot be sent any more."""
        self._source.follow(program)
        before, packed = self.latest, self._source.packed
        digests = _digests(packed)
        if packed.data is before.packed.data and digests == before.digests:
            return
        copies = {}
        for tensor, key in zip(packed.tensors, digests, strict=True):
            if key in before.copies:
                copies[key] = before.copies[key]
            elif key not in before.digests:
                copies[key] = to_bytes(tensor).copy()
        self.latest = ProgramVersion(packed, digests, copies)


def update_for(version: ProgramVersion, data: bytes, held: Collection[bytes]) -> ProgramUpdate:
    """For a node that has the program `data`, and tensors with the digests `held`."""
    packed = version.packed
    lacking = {key: version.copies[key] for key in version.digests if key not in held}
    return ProgramUpdate(None if packed.data is data else packed.data, packed.placements, version.digests, lacking)


def _digests(packed: Packed) -> tuple[bytes, ...]:
    """A version counter would not do: `.data` and batch normalisation go past it."""
    return tuple(digest([to_bytes(tensor)]) for tensor in packed.tensors)


def received(found: ProgramUpdate, tensors: Sequence[torch.Tensor], digests: Sequence[bytes]) -> list[torch.Tensor]:
    """The tensors of a update_for, where `tensors` with these `digests` were there before: the same ones with other
    elements, or, with another program, new ones."""
    here = dict(zip(digests, tensors, strict=True))
    elements = {
        key: found.elements[key] if key in found.elements else to_bytes(here[key]).copy()
        for i, key in enumerate(found.digests)
        if found.data is not None or key != digests[i]
    }
    with torch.no_grad():
        if found.data is None:
            for tensor, placement, key, old in zip(tensors, found.placements, found.digests, digests, strict=True):
                if key != old:
                    copy_into(tensor, from_bytes(elements[key], placement.dtype, placement.shape))
            return list(tensors)
        return [made(placement, elements[key]) for placement, key in zip(found.placements, found.digests, strict=True)]


def made(placement: Placement, elements: Bytes) -> torch.Tensor:
    """A tensor of these elements, in memory of its own."""
    memory = placement.empty()
    copy_into(memory, from_bytes(elements, placement.dtype, placement.shape))
    return placement.dressed(memory)
