"""What a program refers to, and refusing one that reaches what should be trained and would not be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchopt.snapshot import Met, Snapshot
from batchopt_workers.evaluate import Program

# What is beside f: it may keep tensors of its own, and write them.
_BESIDE = ("prehook", "posthook", "module_hooks")


def snapshot_of(program: Program, hooks: bool = True) -> Snapshot:
    """What the program refers to, with or without its hooks."""
    many = len(program.loss_fns) > 1
    losses = {f"loss_fn[{i}]" if many else "loss_fn": loss_fn for i, loss_fn in enumerate(program.loss_fns)}
    beside = {name: getattr(program, name) for name in _BESIDE} if hooks else {}
    return Snapshot({**beside, "module": program.module, "criterion": program.criterion, **losses})


def tensors_of_f(snapshot: Snapshot) -> list[torch.Tensor]:
    """The tensors that f depends on: not those that hooks have for themselves."""
    return [met.tensor for met in snapshot.tensors if not met.path.startswith(_BESIDE)]


def check_trained(program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise `ValueError` for a trainable tensor that the module, the criterion or a loss function reaches, and that is
    none of X's `parameters`: a parameter anywhere, or any other tensor that requires grad and is captured beside
    modules, which keep what they have seen."""
    ours = {id(parameter) for parameter in parameters}
    for met in snapshot_of(program, hooks=False).tensors:
        if met.tensor.requires_grad and id(met.tensor) not in ours and (_is_parameter(met) or not met.in_module):
            raise ValueError(
                f"'{met.path}' is a {'parameter' if _is_parameter(met) else 'tensor'} of shape {tuple(met.tensor.shape)} that "
                "requires grad and is not among the parameters of `module`: it would never be trained. Hold both in one "
                "module (torch.nn.ModuleDict, register_parameter) and pass that; or, if it is not to be trained, call "
                "requires_grad_(False) on it, and requires_grad_() on a detached copy inside the loss where it is "
                "differentiated by"
            )


def _is_parameter(met: Met) -> bool:
    return isinstance(met.tensor, torch.nn.Parameter)
