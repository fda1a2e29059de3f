"""Errors for objects that cannot be sent to workers, or shared with them; they name the part that is to blame."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from batchopt._program.snapshot import Part, of_class, of_container, of_descriptor, of_function
from batchopt_workers.data.batch import Batch, Columns, Samples
from batchopt_workers.data.items import Items
from batchopt_workers.data.packing import DEVICES, SCRIPTED, pack
from batchopt_workers.process.interrupts import let_through

# Depth and seconds after which the search ends with the best result so far.
DEPTH = 24
SECONDS = 2.0

_PLAIN = (dict, list, tuple, set, frozenset, deque)
# Steps that the user did not write: they are omitted from the path.
_CONTAINERS_OF_MODULES = ("_parameters", "_buffers", "_modules")


def blame(obj: object) -> str | None:
    """Return the part of `obj` that cannot be pickled, as in `'module.encoder.lock' (_thread.lock)`. The search goes
    through captured variables, attributes and items.

    Return None if `obj` can be pickled, or if no part of it is to blame. Never raises.
    """
    try:
        found = None if _fault(obj) is None else _Search(time.monotonic() + SECONDS).inside(obj, "", DEPTH)
    except Exception as error:  # raised by a class of the user that is inspected
        let_through(error)
        return None
    if found is None or found[0] == "":
        return None
    path, culprit = found
    return f"'{path.removeprefix('.')}' ({_kind_of(culprit)})"


def _fault(obj: object) -> Exception | None:
    """Return the error that pickling `obj` raises; None if it can be pickled."""
    try:
        pack(obj)
    except Exception as error:
        let_through(error)
        return error
    return None


class _Search:
    """A search for the first part that cannot be pickled although all of its own parts can."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._seen: dict[int, object] = {}  # by identity; kept alive, so that no identity is reused

    def inside(self, obj: object, path: str, depth: int) -> Part | None:
        """Return the path to the part of `obj`, which cannot be pickled, that is to blame, and the part; None if all of
        its faulty parts were seen before: then it is part of a cycle."""
        self._seen[id(obj)] = obj
        if depth == 0:
            return path, obj
        only_seen = False
        for step, part in _parts(obj):
            if time.monotonic() > self._deadline:
                return path, obj
            if id(part) in self._seen:
                only_seen = True
                continue
            fault = _fault(part)
            if fault is None:
                continue
            if isinstance(fault, RecursionError) or isinstance(fault.__cause__, RecursionError):
                return path + step, part
            found = self.inside(part, path + step, depth - 1)
            if found is not None:
                return found
            only_seen = True
        return None if only_seen else (path, obj)


def _parts(obj: Any) -> Iterator[Part]:
    """Return the objects that pickling `obj` descends to, each with its path."""
    if isinstance(obj, SCRIPTED):
        return iter(())
    if isinstance(obj, FunctionType):
        return of_function(obj)
    if isinstance(obj, (MethodType, BuiltinMethodType)):
        return iter([(".self", obj.__self__), ("", getattr(obj, "__func__", None))])
    if isinstance(obj, functools.partial):
        given = ((f".args{step}", value) for step, value in of_container(obj.args))
        return chain([("", obj.func)], given, _attributes(obj.keywords))
    if isinstance(obj, (staticmethod, classmethod, property)):
        return of_descriptor(obj)
    if isinstance(obj, type):
        return of_class(obj)
    if isinstance(obj, torch.Tensor):
        return _attributes(vars(obj)) if obj.device.type in DEVICES else iter(())
    if isinstance(obj, Batch):
        return iter([("" if part.name is None else f".{part.name}", part) for part in obj.parts])
    if isinstance(obj, _PLAIN):
        return chain(of_container(obj), () if type(obj) in _PLAIN else _of_instance(obj))
    return _of_instance(obj)


def _attributes(state: dict[str, Any]) -> Iterator[Part]:
    for name, value in state.items():
        yield f".{name}", value


def _of_instance(obj: Any) -> Iterator[Part]:
    """Yield the state of an instance as it would be pickled, then its class."""
    if isinstance(obj, torch.nn.Module) and is_parametrized(obj):
        reduced: Any = (None, (type(obj),), vars(obj))  # as `pack` does it
    else:
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception as error:  # the object itself is to blame
            let_through(error)
            return
    if isinstance(reduced, str):  # pickled by name
        return
    make, arguments, state, items, pairs = [*reduced, None, None, None][:5]
    yield from _of_state(obj, state)
    names = {id(value): name for name, value in getattr(obj, "__dict__", {}).items()}
    for argument in (*arguments, make):
        yield f".{names[id(argument)]}" if id(argument) in names else "", argument
    yield from of_container(items or ())
    yield from of_container(dict(pairs or ()))


def _of_state(obj: Any, state: Any) -> Iterator[Part]:
    both = state if isinstance(state, tuple) and len(state) == 2 else (state, None)  # __dict__ and __slots__
    if not all(part is None or isinstance(part, dict) for part in both):
        yield "", state
        return
    for step, value in chain.from_iterable(_attributes(part or {}) for part in both):
        if isinstance(obj, torch.nn.Module) and step[1:] in _CONTAINERS_OF_MODULES:
            yield from _attributes(value)
        else:
            yield "" if isinstance(obj, (Columns, Samples, Items)) else step, value


def _kind_of(obj: object) -> str:
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} on {obj.device}" if isinstance(obj, torch.Tensor) else name


@contextmanager
def sending(what: str, *objects: Any) -> Iterator[None]:
    """Turn an error of pickling `objects` into a `TypeError` that names `what`, and what it captures."""
    try:
        yield
    except Exception as error:
        let_through(error)
        blamed = next((found for found in map(blame, objects) if found), None)
        reason = str(error) if blamed is None else f"it captures {blamed}: {error}"
        raise TypeError(f"{what} cannot be sent to worker processes: {reason}") from error


def check_module(module: torch.nn.Module) -> None:
    """Raise `TypeError` for a module whose parameters cannot be those of X in workers, and `ValueError` for one whose
    forward writes its parameters, which all workers share."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(p.requires_grad for p in part.parameters()):
            what = f"'{name}'" if name else "`module`"
            raise TypeError(
                f"{what} was made by torch.jit ({type(part).__name__}), whose parameters cannot be made views of X in "
                "workers: pass the module that it was made of, or use parallelize=1"
            )
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.max_norm is not None:
            raise ValueError(
                f"'{name}' has max_norm: it writes its weight in every forward, which all workers share; normalise "
                "what comes out of it instead, or use parallelize=1"
            )
