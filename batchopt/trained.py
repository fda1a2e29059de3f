"""Refusing a program that reaches what should be trained and would not be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchopt.snapshot import Snapshot, untrained
from batchopt_workers.evaluate import Program


def check_trained(program: Program, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise `ValueError` for a trainable tensor that the module, the criterion or a loss function reaches, and that is
    none of X's `parameters`."""
    losses = {f"loss_fn[{i}]": loss_fn for i, loss_fn in enumerate(program.loss_fns)}
    if len(losses) == 1:
        losses = {"loss_fn": program.loss_fns[0]}
    met = untrained(Snapshot({**losses, "criterion": program.criterion, "module": program.module}), parameters)
    if met is not None:
        kind = "parameter" if isinstance(met.tensor, torch.nn.Parameter) else "tensor"
        raise ValueError(
            f"'{met.path}' is a {kind} of shape {tuple(met.tensor.shape)} that requires grad and is not among the parameters "
            "of `module`: it would never be trained. Hold both in one module (its forward may be the loss: "
            "torch.nn.ModuleDict, register_parameter) and pass that; or, if it is not to be trained, call "
            "requires_grad_(False) on it, and requires_grad_() on a detached copy inside the loss where it is differentiated by"
        )
