"""The program for worker processes: pickled without its tensors, which lie in shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, NamedTuple

import torch

from batchopt._program.program import PickledProgram
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.wanted import Activity
from batchopt.backends.process.worker import call, call_with_block
from batchopt_workers.evaluate.program import Program
from batchopt_workers.life.session import Session
from batchopt_workers.life.torch_settings import TorchSettings, module_hooks
from batchopt_workers.watch.record import tensors_of
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.packing import Packed, copy_into


class _SharedTensor(NamedTuple):
    """A tensor of the program, and its place in shared memory; `bound`: whether the tensor itself lies there."""

    tensor: torch.Tensor
    view: torch.Tensor
    bound: bool


class SharedProgram:
    """A copy of the user's program in shared memory, updated at each step.

    Frozen parameters and buffers become views of the workers' block, so that anything written to them is what the
    workers have at the next step: version counters would not do, since `.data` and batch normalisation bypass them.
    Other tensors, and those that share memory with something else, are copied at each step.
    """

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises `TypeError` for a program that cannot be sent."""
        self.source = PickledProgram(program, parameters)
        self.block = _new_block(self.source.packed)
        self._constants: list[_SharedTensor] = []
        self._placed: Packed | None = None  # the content of the block
        self._left: list[SharedBlock] = []  # previous blocks
        self._place()

    def follow(self, program: Program) -> None:
        """Take over changes by the user, in `program` or in what it refers to; the workers must be idle. They need the
        program again if `data` of the source or the block is another one; changed elements of tensors they see at once.
        After an interrupt or an error the next call completes the work.

        Raises `TypeError` for a program that can no longer be sent.
        """
        self.source.resync(program)
        now, placed = self.source.packed, self._placed
        if now is placed:
            self._refresh()
            return
        if placed is None or now.placements != placed.placements or self._have_moved(now):
            self._left.append(self.block)
            self._placed = None
            self.block = _new_block(now)
        self._place()
        while self._left:  # the user may still have a tensor there that is no longer part of the program
            self._left[-1].make_private()
            self._left.pop()

    def close(self) -> None:
        """Make the memory of the tensors that of this process alone, after the workers have ended."""
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
        """Tell whether a bound tensor lies at another place in the block than its own."""
        places = {id(constant.tensor): constant.view.data_ptr() for constant in self._constants if constant.bound}
        found = (
            (places.get(id(tensor)), constant) for tensor, constant in zip(packed.tensors, self._constants, strict=True)
        )
        return any(place is not None and place != constant.view.data_ptr() for place, constant in found)

    def _refresh(self) -> None:
        """Copy to the block the tensors that are not bound to it."""
        with torch.no_grad():
            for tensor, view, bound in self._constants:
                if tensor.data_ptr() != view.data_ptr():
                    copy_into(view, tensor)
                    if bound:
                        tensor.data = view


@dataclass(frozen=True)
class Ambient:
    """The settings in force where an evaluation is requested, which for a node is in the parent's process."""

    torch_settings: Callable[[], TorchSettings] = TorchSettings.current
    module_hooks: Callable[[], Mapping[str, Any]] = module_hooks


class SentProgram:
    """The program sent to the workers of a pool, and sent again when the user has changed it."""

    def __init__(self, pool: Pool, program: Program, shared: SharedProgram, sent: Callable[[], None]) -> None:
        """`shared` has `program` in shared memory; `sent` is called when workers are given another one."""
        self.program = program  # to be evaluated from the next step on
        self._pool, self._on_sent = pool, sent
        self._shared = shared
        self._sent: tuple[bytes, SharedBlock] | None = None  # the version that the workers' other state belongs to
        self.version = object()  # another one whenever workers are sent one

    def change(self, **fields: Any) -> None:
        """Replace these fields of the program. Raises `TypeError` for hooks that cannot be sent."""
        before, self.program = self.program, replace(self.program, **fields)
        try:
            self.follow(self.program.module_hooks)
        except BaseException:
            self.program = before
            raise

    def follow(self, module_hooks: Mapping[str, Any]) -> bool:
        """Send changes of the program by the user, with these hooks of all modules; return whether anything was
        sent."""
        if self.program.module_hooks != module_hooks:
            self.program = replace(self.program, module_hooks=module_hooks)
        self._shared.follow(self.program)
        now = self._shared.source.packed.data, self._shared.block
        if self._sent is not None and all(map(is_, self._sent, now)):
            return False
        self.send()
        return True

    def send(self) -> None:
        """Send the workers the program; what they drop with the previous one they are sent again."""
        self._sent, self.version = None, object()
        source, block, pool = self._shared.source, self._shared.block, self._pool
        packed = source.packed
        attach = call_with_block(Activity.INSTALLING, Session.attach_copy, "program", block)
        pool.tell_of("memory", block, lambda: [attach])
        pool.tell(
            "module",
            call(Activity.INSTALLING, Session.install, packed.data, packed.placements, source.read_only),
        )
        self._on_sent()
        self._sent = packed.data, block

    def close(self) -> None:
        """Release the memory, after the workers have ended."""
        self._shared.close()
        self._sent = None
        self._on_sent = lambda: None  # a method of an object that refers to this one


def _new_block(packed: Packed) -> SharedBlock:
    block = SharedBlock.create(packed.nbytes)
    block.copy_on_fork()
    return block


def _alone(module: torch.nn.Module, bound: Collection[int]) -> set[int]:
    """Return the frozen parameters and buffers of a module that share memory with nothing else, as far as can be known;
    those that are `bound` already, by identity, have memory that torch did not allocate."""
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for _, owner, name, tensor in tensors_of(module):
        if tensor.layout is torch.strided and not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
            registered = name in owner._buffers or name in owner._parameters
            found[id(tensor)] = tensor, registered or found.get(id(tensor), (tensor, False))[1]
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor, _ in found.values())
    return {
        key
        for key, (tensor, registered) in found.items()
        if registered and storages[tensor.untyped_storage().data_ptr()] == 1 and (key in bound or _is_whole(tensor))
    }


def _is_whole(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor owns its storage, which torch allocated."""
    storage = tensor.untyped_storage()
    return storage.resizable() and storage.nbytes() == tensor.numel() * tensor.element_size()
