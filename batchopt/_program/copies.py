"""Deep copies of a program, including modules that a loss function has captured, and the map function on them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any

import torch

from batchopt._program.flatten import Flat
from batchopt_workers.batch.placing import Placing
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.program import Program
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.evaluate.unwritten import constants
from batchopt_workers.evaluate.worker import Worker
from batchopt_workers.watch.graph import names_of_globals
from batchopt_workers.watch.places import LARGEST_STATISTIC
from batchopt_workers.wire.interrupts import let_through
from batchopt_workers.wire.structures import tensors_in


def copied(program: Program, shared: Iterable[torch.Tensor] = ()) -> Program:
    """Return the program with copies of module and criterion, and functions that refer to the copies, all but the
    `shared` tensors. Tensors with a graph, which cannot be copied, that a forward has stored in an attribute are
    detached."""
    whole = (program.module, program.criterion)
    parts = [part for one in whole if isinstance(one, torch.nn.Module) for part in one.modules()]
    left = [tensor for part in parts for tensor in tensors_in(vars(part)) if not tensor.is_leaf]
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in left}
    memo |= {id(tensor): tensor for tensor in shared}
    module, criterion = copy.deepcopy(whole, memo)
    return replace(
        program,
        module=module,
        criterion=criterion,
        loss_fns=tuple(_copy(loss_fn, memo) for loss_fn in program.loss_fns),
        prehook=_copy(program.prehook, memo),
        posthook=_copy(program.posthook, memo),
    )


def evaluator_of_copy(program: Program, flat: Flat, shared: Iterable[torch.Tensor]) -> Evaluator:
    """Return the map function on a copy of the program, at the present X. `shared`: tensors that are not copied if they
    are large, as data that a module keeps. Raise what the user's classes raise."""
    large = [tensor for tensor in shared if tensor.numel() > LARGEST_STATISTIC]
    copy, x = copied(program, large), flat.vector.clone()
    own = dict(copy.module.named_parameters())
    parameters = [own[slot.name] for slot in flat.layout.slots]
    for parameter, view in zip(parameters, flat.layout.views(x), strict=True):
        parameter.data = view  # it lies in memory as in X, on which bits depend
    if not all(parameter.is_leaf for parameter in parameters):
        raise TypeError("copies of scripted modules have no parameters of their own")
    worker = Worker(0, 1, x.device, copy.module, copy.criterion)
    found = Evaluator(copy, worker, parameters, ModuleState(copy.module), constants(()))
    if x.device.type != "cpu":
        found.walk.place = Placing(x.device)
    return found


def _copy(obj: Any, memo: dict[int, Any]) -> Any:
    """Return `obj` with the copies made so far in place of the originals; `obj` itself if it cannot be copied."""
    if id(obj) in memo:
        return memo[id(obj)]
    if isinstance(obj, FunctionType):
        return _copy_of_function(obj, memo)
    if isinstance(obj, functools.partial):
        arguments = [_copy(argument, memo) for argument in obj.args]
        return functools.partial(
            _copy(obj.func, memo), *arguments, **{k: _copy(v, memo) for k, v in obj.keywords.items()}
        )
    try:
        return copy.deepcopy(obj, memo)
    except Exception as error:  # a lock, a library, a tensor with a graph: nothing that depends on X
        let_through(error)
        return obj


def _copy_of_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    memo[id(function)] = function  # in case it refers to itself
    cells = tuple(_copy_of_cell(cell, memo) for cell in function.__closure__ or ())
    names = [name for name in names_of_globals(function.__code__) if id(function.__globals__.get(name)) in memo]
    changed = {name: memo[id(function.__globals__[name])] for name in names}
    scope = {**function.__globals__, **changed} if changed else function.__globals__
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells or None)
    made.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = made
    return made


def _copy_of_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    if id(cell) not in memo:
        memo[id(cell)] = made = CellType()
        with suppress(ValueError):  # a variable that has no value yet
            made.cell_contents = _copy(cell.cell_contents, memo)
    found: CellType = memo[id(cell)]
    return found
