"""The user's program as it is sent to workers: pickled, pickled again after a change, and checked for parts that cannot
be sent or would not be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from batchopt._program.unpicklable import can_be_packed, unsendable
from batchopt_workers.evaluate.program import Program
from batchopt_workers.watch.record import FoundTensor, Record
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.packing import Packed, Placement, pack

# Parts that do not belong to f: they may keep tensors of their own, and write them.
_BESIDE = {
    "prehook": "`prehook`",
    "posthook": "`posthook`",
    "module_hooks": "a hook of all modules (register_module_forward_hook)",
}


class PickledProgram:
    """A program pickled separately from its tensors, and pickled again after any change in it."""

    def __init__(self, program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
        """`parameters`: those of X. Raise `TypeError` for a program that cannot be sent, and `ValueError` for one with
        a tensor over the memory of X."""
        self.program, self._parameters = program, parameters
        self._take(_packed(program, parameters))

    def resync(self, program: Program) -> None:
        """Take over the user's changes in `program` or in what it refers to; elements of tensors are not compared. The
        `data` of `packed` is a new object only if the workers need it.

        Raise `TypeError` for a program that can no longer be sent, and `ValueError` for a tensor over the memory of X.
        """
        unchanged = program is self.program and not self._derived and self._snapshot.holds()
        if unchanged and not any(map(_has_another_form, self.packed.tensors, self.packed.placements)):
            return
        packed, before = _packed(program, self._parameters), self.packed
        if (packed.data, packed.placements) == (before.data, before.placements):
            packed = replace(packed, data=before.data, placements=before.placements)
        self.program = program
        self._take(packed)

    def _take(self, packed: Packed) -> None:
        self.packed = packed
        self._snapshot = snapshot_of(self.program)
        _check_apart(self._snapshot, self._parameters)
        # tensors made by pickling, from an object that cannot be inspected: only pickling again shows a change
        known = {id(found.tensor) for found in self._snapshot.tensors}
        self._derived = not known.issuperset(map(id, packed.tensors))

    @property
    def read_only(self) -> dict[int, str]:
        """The names of the tensors that f depends on, by their index among the packed ones."""
        names = {id(found.tensor): found.path for found in tensors_of_f(self._snapshot)}
        return {i: names[id(tensor)] for i, tensor in enumerate(self.packed.tensors) if id(tensor) in names}


def _check_apart(snapshot: Record, parameters: Sequence[torch.Tensor]) -> None:
    ours = {id(parameter) for parameter in parameters}
    extents = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters if p.numel()]
    first, last = min(extents)[0], max(extents)[1]
    for found in snapshot.tensors:
        tensor = found.tensor
        if id(tensor) in ours or tensor.layout is not torch.strided or not first <= tensor.data_ptr() < last:
            continue
        if any(start <= tensor.data_ptr() < end for start, end in extents):
            raise ValueError(
                f"'{found.path}' is a tensor over the memory of a parameter (p.data, p.detach(), a view): workers "
                "would have what it is now, and not follow the parameter; keep the Parameter itself, or a clone"
            )


def _has_another_form(tensor: torch.Tensor, placement: Placement) -> bool:
    return tensor.shape != placement.shape or tensor.dtype != placement.dtype


def _packed(program: Program, parameters: Sequence[torch.Tensor]) -> Packed:
    """Pack the program. Raise `TypeError`, which names the part that cannot be sent, and what is in it."""
    try:
        return pack(program, parameters, expanded=True)
    except Exception as error:
        let_through(error)
        what: tuple[str, Any] = "the module, the criterion or a `loss_fn`", program
        beside = ((name, getattr(program, field)) for field, name in _BESIDE.items())
        guilty = (hook for hook in beside if hook[1] and not can_be_packed(hook[1], parameters))
        name, obj = next(guilty, what)
        raise unsendable(name, error, obj) from error


def snapshot_of(program: Program, hooks: bool = True) -> Record:
    """Return a record of everything that the program refers to, with or without its hooks."""
    beside = {name: getattr(program, name) for name in _BESIDE} if hooks else {}
    return Record(beside | roots_of(program), functions=True)


def roots_of(program: Program) -> dict[str, object]:
    """Return the parts of the program that f depends on, by name."""
    many = len(program.loss_fns) > 1
    losses = {f"loss_fn[{i}]" if many else "loss_fn": loss_fn for i, loss_fn in enumerate(program.loss_fns)}
    return {"module": program.module, "criterion": program.criterion, **losses}


def tensors_of_f(snapshot: Record) -> list[FoundTensor]:
    """Return the tensors that f depends on, without those that only hooks refer to."""
    return [found for found in snapshot.tensors if not found.path.startswith(tuple(_BESIDE))]


def check_trained(program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise `ValueError` for a trainable tensor that the module, the criterion or a loss function reaches, and that is
    not among X's `parameters`: any parameter, or another tensor that requires grad and is captured outside of modules
    (inside, it may be left over from a forward)."""
    ours = {id(parameter) for parameter in parameters}
    for path, tensor, in_module, in_class in snapshot_of(program, hooks=False).tensors:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        # attributes of a class belong to its other instances too
        if tensor.requires_grad and id(tensor) not in ours and not in_class and (is_parameter or not in_module):
            raise ValueError(
                f"'{path}' is a {'parameter' if is_parameter else 'tensor'} of shape {tuple(tensor.shape)} that "
                "requires grad and is not among the parameters of `module`: it would "
                "never be trained. Hold both in one module (torch.nn.ModuleDict, register_parameter) and pass that; "
                "or, if it is not to be trained, call requires_grad_(False) on it, and requires_grad_() on a "
                "detached copy inside the loss where it is differentiated by"
            )
