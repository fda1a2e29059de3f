"""The program as the workers have to have it: pickled apart from its tensors, which lie in shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from batchopt._program.program import Source
from batchopt_workers.buffers import tensors_of
from batchopt_workers.evaluate import Program
from batchopt_workers.memory import SharedBlock
from batchopt_workers.packing import Packed, copy_into


class _SharedTensor(NamedTuple):
    """A tensor of the program, and its place in shared memory; `bound`: whether the tensor itself lies there."""

    tensor: torch.Tensor
    view: torch.Tensor
    bound: bool


class SharedProgram:
    """A program in shared memory, which follows the one of the user.

    Frozen parameters and buffers become views of the workers' block, so that whatever is written to them, however, is
    what the workers have at the next step: a version counter would not do, since `.data` and batch normalisation go
    past it. Other tensors, and those that share memory with something else, are copied there at each step.
    """

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises `TypeError` for a program that cannot be sent."""
        self.source = Source(program, parameters)
        self.block = _new_block(self.source.packed)
        self._constants: list[_SharedTensor] = []
        self._placed: Packed | None = None  # what the block has
        self._left: list[SharedBlock] = []  # blocks that it had
        self._place()

    def follow(self, program: Program) -> None:
        """Take over what the user has changed since, in `program` or in what it refers to; the workers must be idle.
        They need it anew if the `data` of the source is another one, or the block; where only the elements of tensors
        have changed, they see them. What an interrupt or an error has left half done is done by the next call.

        Raises `TypeError` for a program that cannot be sent any more.
        """
        self.source.follow(program)
        now, placed = self.source.packed, self._placed
        if now is placed:
            self._refresh()
            return
        if placed is None or now.placements != placed.placements or self._have_moved(now):
            self._left.append(self.block)
            self._placed = None
            self.block = _new_block(now)
        self._place()
        while self._left:  # the user may have a tensor there that is no part of the program any more
            self._left[-1].make_private()
            self._left.pop()

    def close(self) -> None:
        """The workers are gone: the tensors stay where they are, in memory of this process alone."""
        for block in (*self._left, self.block):
            block.make_private()

    def _place(self) -> None:
        packed = self.source.packed
        bound = {id(constant.tensor) for constant in self._constants if constant.bound}
        can_be_bound = _alone(self.source.program.module, bound)
        self._constants = [
            _SharedTensor(tensor, placement.view(self.block), id(tensor) in can_be_bound)
            for tensor, placement in zip(packed.tensors, packed.placements, strict=True)
        ]
        self._refresh()
        self._placed = packed

    def _have_moved(self, packed: Packed) -> bool:
        """Whether a tensor lies in the block at another place than its own."""
        places = {id(constant.tensor): constant.view.data_ptr() for constant in self._constants if constant.bound}
        found = (
            (places.get(id(tensor)), constant) for tensor, constant in zip(packed.tensors, self._constants, strict=True)
        )
        return any(place is not None and place != constant.view.data_ptr() for place, constant in found)

    def _refresh(self) -> None:
        """Bring to the block what is not there."""
        with torch.no_grad():
            for tensor, view, bound in self._constants:
                if tensor.data_ptr() != view.data_ptr():
                    copy_into(view, tensor)
                    if bound:
                        tensor.data = view


def _new_block(packed: Packed) -> SharedBlock:
    block = SharedBlock.create(packed.nbytes)
    block.keep_apart()
    return block


def _alone(module: torch.nn.Module, bound: Collection[int]) -> set[int]:
    """The frozen parameters and buffers of a module that nothing else shares memory with, as far as that can be known;
    those that are `bound` already, by identity, have memory that torch did not make."""
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for _, place in tensors_of(module):
        tensor = place.get()
        if tensor.layout is torch.strided and not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
            registered = place.name in place.owner._buffers or place.name in place.owner._parameters
            found[id(tensor)] = tensor, registered or found.get(id(tensor), (tensor, False))[1]
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor, _ in found.values())
    return {
        key
        for key, (tensor, registered) in found.items()
        if registered and storages[tensor.untyped_storage().data_ptr()] == 1 and (key in bound or _is_whole(tensor))
    }


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it has memory of torch's to itself."""
    storage = tensor.untyped_storage()
    return storage.resizable() and storage.nbytes() == tensor.numel() * tensor.element_size()
