"""The program as the workers have to have it: pickled apart from its tensors, which lie in shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from batchopt.captures import blame
from batchopt.program import snapshot_of, tensors_of_f
from batchopt_workers.buffers import tensors_of
from batchopt_workers.evaluate import Program
from batchopt_workers.memory import SharedBlock
from batchopt_workers.packing import Packed, Placement, copy_into, pack

_PARTS = {
    "prehook": "`prehook`",
    "posthook": "`posthook`",
    "module_hooks": "a hook of all modules (register_module_forward_hook)",
}


def pack_program(program: Program, parameters: Sequence[torch.Tensor]) -> Packed:
    """Raises `TypeError`, which names the part of the program that cannot be sent, and what of it."""
    try:
        return pack(program, parameters, expanded=True)
    except Exception as error:
        what, blamed = "the module, the criterion or a `loss_fn`", blame(program)
        for field, name in _PARTS.items():
            found = getattr(program, field)
            if found and not _can_be_packed(found, parameters):
                what, blamed = name, blame(found)
                break
        reason = str(error) if blamed is None else f"it captures {blamed}: {error}"
        raise TypeError(f"{what} cannot be sent to worker processes: {reason}") from error


def _can_be_packed(obj: object, parameters: Sequence[torch.Tensor]) -> bool:
    try:
        pack(obj, parameters)
    except Exception:
        return False
    return True


class _Constant(NamedTuple):
    """A tensor of the program, and its place in shared memory; `bound`: whether the tensor itself lies there."""

    tensor: torch.Tensor
    view: torch.Tensor
    placement: Placement
    bound: bool


class SharedProgram:
    """A program in shared memory, which follows the one of the user.

    Frozen parameters and buffers become views of the workers' block, so that whatever is written to them, however, is
    what the workers have at the next step: a version counter would not do, since `.data` and batch normalisation go past
    it. Other tensors, and those that share memory with something else, are copied there at each step.
    """

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises `TypeError` for a program that cannot be sent."""
        self._program, self._parameters = program, parameters
        self.packed = pack_program(program, parameters)
        self.block = _new_block(self.packed)
        self.read_only: tuple[int, ...]  # the tensors, by their place among the packed ones, that f depends on
        self._constants: list[_Constant] = []
        self._take(self.packed)

    def follow(self, program: Program) -> bool:
        """Take over what the user has changed since, in `program` or in what it refers to; the workers must be idle.
        Returns whether the workers need it anew; where only the elements of tensors have changed, they see them.

        Raises `TypeError` for a program that cannot be sent any more.
        """
        unchanged = program is self._program and not self._derived and self._snapshot.holds()
        self._program = program
        if unchanged and self._refresh():
            return False
        packed, before = pack_program(program, self._parameters), self.block
        same = packed.data == self.packed.data and packed.placements == self.packed.placements
        if packed.placements != self.packed.placements or self._have_moved(packed):
            self.block = _new_block(packed)
        self._take(packed)
        if self.block is not before:
            before.make_private()  # the user may have a tensor there that is no part of the program any more
        return not same or self.block is not before

    def close(self) -> None:
        """The workers are gone: the tensors stay where they are, in memory of this process alone."""
        self.block.make_private()

    def _take(self, packed: Packed) -> None:
        self.packed = packed
        bound = {id(constant.tensor) for constant in self._constants if constant.bound}
        can_be_bound = _alone(self._program.module, bound)
        self._constants = [
            _Constant(tensor, placement.view(self.block), placement, id(tensor) in can_be_bound)
            for tensor, placement in zip(packed.tensors, packed.placements, strict=True)
        ]
        self._refresh()
        self._snapshot = snapshot_of(self._program)
        # made by pickling, of something that cannot be looked into: a change is only seen by pickling again
        self._derived = not all(self._snapshot.knows(tensor) for tensor in packed.tensors)
        of_f = {id(tensor) for tensor in tensors_of_f(self._snapshot)}
        self.read_only = tuple(i for i, tensor in enumerate(packed.tensors) if id(tensor) in of_f)

    def _have_moved(self, packed: Packed) -> bool:
        """Whether a tensor lies in the block at another place than its own."""
        places = {id(constant.tensor): constant.view.data_ptr() for constant in self._constants if constant.bound}
        found = (
            (places.get(id(tensor)), constant) for tensor, constant in zip(packed.tensors, self._constants, strict=True)
        )
        return any(place is not None and place != constant.view.data_ptr() for place, constant in found)

    def _refresh(self) -> bool:
        """Bring to the block what is not there. False if a tensor has got another form."""
        for constant in self._constants:
            if constant.tensor.shape != constant.placement.shape or constant.tensor.dtype != constant.placement.dtype:
                return False
        with torch.no_grad():
            for constant in self._constants:
                if constant.tensor.data_ptr() != constant.view.data_ptr():
                    copy_into(constant.view, constant.tensor)
                    if constant.bound:
                        constant.tensor.data = constant.view
        return True


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
