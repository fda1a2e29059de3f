"""The program on its way to nodes: whole when a node starts, and later what has changed of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from batchopt._program.program import PickledProgram
from batchopt.backends.nodes.transfer import Bytes, digest, from_bytes, to_bytes
from batchopt_workers.data.packing import Placement, copy_into
from batchopt_workers.map.evaluate import Program


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
