"""Errors for objects that cannot be sent to workers, or shared with them; they name the part that is to blame."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from batchopt_workers.watch.graph import CONTAINERS, Part, is_imported, parts_of
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.packing import SCRIPTED, pack

_MOST = 200  # parts that are looked at, of what is nested without end
# Kinds of functions, whose parts are sent as they are; other objects decide by themselves what is sent of them.
_FUNCTIONS = (FunctionType, MethodType, CellType, functools.partial, staticmethod, classmethod, property)


def can_be_packed(obj: object, parameters: Sequence[torch.Tensor] = ()) -> bool:
    """Tell whether an object can be pickled around these parameters of X."""
    try:
        pack(obj, parameters)
    except Exception as error:
        let_through(error)
        return False
    return True


def blame(obj: object) -> str | None:
    """Return the part of `obj` that cannot be pickled, though all of its own parts can, as in `'encoder.lock'
    (_thread.lock)`: by a shortest path through captured variables, attributes and items.

    Return None if `obj` can be pickled, or if there is no such part. Never raises.
    """
    todo, seen = deque([("", obj)] if not can_be_packed(obj) else ()), {id(obj): obj}
    try:
        while todo and len(seen) < _MOST:
            path, at = todo.popleft()
            bad = [(path + step, part) for step, part in _sent_of(at) if not can_be_packed(part)]
            if path and not bad:
                kind = f"{type(at).__module__}.{type(at).__qualname__}".removeprefix("builtins.")
                return f"'{path.removeprefix('.')}' ({kind})"
            todo.extend(found for found in bad if id(found[1]) not in seen)  # others are part of a circle
            seen.update((id(part), part) for _, part in bad)
    except Exception as error:  # of a class of the user that is inspected
        let_through(error)
    return None


def _sent_of(obj: Any) -> Iterator[Part]:
    """Yield the objects that pickling `obj` descends to, each with its step."""
    if isinstance(obj, SCRIPTED) or (isinstance(obj, (FunctionType, type)) and is_imported(obj)):
        return
    if isinstance(obj, (*_FUNCTIONS, type, torch.nn.Module, torch.Tensor)) or type(obj) in CONTAINERS:
        yield from parts_of(obj)
    else:
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception as error:  # the object itself is to blame
            let_through(error)
            return
        if not isinstance(reduced, str):  # pickled by name
            _, arguments, state, items, pairs = [*reduced, None, None, None][:5]
            states = [part for part in (state if isinstance(state, tuple) else (state,)) if part is not None]
            values = chain(*(part.values() if isinstance(part, dict) else (part,) for part in states))
            names = {id(part): step for step, part in parts_of(obj)}
            for part in (*arguments, *values, *(items or ()), *chain(*(pairs or ()))):
                yield names.get(id(part), ""), part
    if not isinstance(obj, type):
        yield "", type(obj)


def unsendable(what: str, error: Exception, *objects: Any) -> TypeError:
    """Return the error that names `what`, which could not be pickled, and what one of the `objects` captures."""
    blamed = next((found for found in map(blame, objects) if found), None)
    reason = str(error) if blamed is None else f"it captures {blamed}: {error}"
    return TypeError(f"{what} cannot be sent to worker processes: {reason}")


@contextmanager
def sending(what: str, *objects: Any) -> Iterator[None]:
    """Turn an error of pickling `objects` into a `TypeError` that names `what`, and what it captures."""
    try:
        yield
    except Exception as error:
        let_through(error)
        raise unsendable(what, error, *objects) from error


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
