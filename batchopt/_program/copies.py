"""Copies of a program in this process: as workers get it, so that the same programs can be copied, and in the same way.

`copy.deepcopy` would not do: it leaves functions as they are, and a criterion or a hook that refers to the module would
go on with the original.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from batchopt._program.flatten import Flat
from batchopt_workers.batch.placing import Placing
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.program import Program, Worker
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.evaluate.unwritten import constants
from batchopt_workers.watch.record import LARGEST_STATISTIC
from batchopt_workers.wire.packing import Packer, assemble, own_classes


def copied(program: Program, parameters: Sequence[torch.Tensor] = (), own: Sequence[torch.Tensor] = ()) -> Program:
    """Return a copy of the program, with `own` in the place of these parameters. Constants of more than
    `LARGEST_STATISTIC` elements, as data that a module keeps, are shared. Raise what pickling raises."""
    file = io.BytesIO()
    packer = Packer(file, parameters, any_kind=True)
    packer.dump(program)
    with own_classes():
        found: Program = assemble(file.getvalue(), [_copy(tensor) for tensor in packer.tensors], own)
    return found


def _copy(tensor: torch.Tensor) -> Any:
    if tensor.numel() > LARGEST_STATISTIC and not tensor.requires_grad:
        return tensor
    copy = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def evaluator_of_copy(program: Program, flat: Flat, parameters: Sequence[torch.Tensor]) -> Evaluator:
    """Return the map function, without hooks, on a copy of the program at the present X, whose tensors are these
    parameters. Raise what pickling raises, and `TypeError` for a module that keeps parameters to itself."""
    x = flat.vector.clone()
    own = [torch.nn.Parameter(view) for view in flat.layout.views(x)]  # it lies in memory as X, on which bits depend
    copy = copied(replace(program, prehook=None, posthook=None, module_hooks={}), parameters, own)
    there = {parameter.data_ptr() for parameter in copy.module.parameters()}
    if not there.issuperset(parameter.data_ptr() for parameter in own):
        raise TypeError("the module was scripted as a whole, and its copy has parameters of its own")
    worker = Worker(0, 1, x.device, copy.module, copy.criterion)
    found = Evaluator(copy, worker, own, ModuleState(copy.module), constants(()))
    if x.device.type != "cpu":
        found.walk.place = Placing(x.device)
    return found
