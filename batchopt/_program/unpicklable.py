"""Errors for objects that cannot be sent to workers, or shared with them; they name the part that is to blame."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from batchopt_workers.batch.batch import Batch, Columns, Samples
from batchopt_workers.batch.items import Items
from batchopt_workers.watch.graph import CONTAINERS, OF_MODULES, Part, is_imported, of_container, parts_of
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.packing import DEVICES, SCRIPTED, pack

_WRAPPED = (MethodType, functools.partial, staticmethod, classmethod, property)


def blame(obj: object) -> str | None:
    """Return the part of `obj` that cannot be pickled, as in `'module.encoder.lock' (_thread.lock)`: the path goes
    through captured variables, attributes and items.

    Return None if `obj` can be pickled, or if no part of it is to blame. Never raises.
    """
    try:
        error = _error_of(obj)
        path = None if error is None else _path(obj, _is_deep(error))
        if path:
            steps, part = path
            return f"'{steps.removeprefix('.')}' ({_kind_of(part)})"
    except Exception as another:  # raised by a class of the user that is inspected
        let_through(another)
    return None


def _is_deep(error: Exception) -> bool:
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _path(obj: object, is_deep: bool) -> tuple[str, object] | None:
    """Return the steps to the part of `obj` that cannot be pickled itself, by a shortest path, and that part; of an
    object that `is_deep` the first one only."""
    todo, seen = deque([("", obj)]), {id(obj)}
    while todo:
        path, at = todo.popleft()
        bad = [(path + step, part) for step, part in _parts(at) if not can_be_packed(part)]
        if (path and not bad) or (is_deep and bad):
            return bad[0] if bad else (path, at)
        new = [found for found in bad if id(found[1]) not in seen]  # others are part of a circle
        seen.update(id(part) for _, part in new)
        todo.extend(sorted(new, key=lambda found: isinstance(found[1], torch.nn.Module)))
    return None


def _error_of(obj: object, parameters: Sequence[torch.Tensor] = ()) -> Exception | None:
    try:
        pack(obj, parameters)
    except Exception as error:
        let_through(error)
        return error
    return None


def can_be_packed(obj: object, parameters: Sequence[torch.Tensor] = ()) -> bool:
    """Tell whether an object can be pickled around these parameters of X."""
    return _error_of(obj, parameters) is None


def _parts(obj: Any) -> Iterable[Part]:
    """Return the objects that pickling `obj` descends to, each with its step."""
    if isinstance(obj, SCRIPTED) or (isinstance(obj, (FunctionType, type)) and is_imported(obj)):
        return ()
    if isinstance(obj, (FunctionType, type, *_WRAPPED)) or type(obj) in CONTAINERS:
        return parts_of(obj)
    if isinstance(obj, BuiltinMethodType):
        return ((".self", obj.__self__),)
    if isinstance(obj, torch.Tensor):
        return _attributes(vars(obj)) if obj.device.type in DEVICES else ()
    if isinstance(obj, Batch):
        return [("" if part.name is None else f".{part.name}", part) for part in obj.parts]
    return chain(of_container(obj) if isinstance(obj, CONTAINERS) else (), _of_instance(obj))


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
        if isinstance(obj, torch.nn.Module) and step[1:] in OF_MODULES:
            yield from _attributes(value)
        else:
            yield "" if isinstance(obj, (Columns, Samples, Items)) else step, value


def _kind_of(obj: object) -> str:
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} on {obj.device}" if isinstance(obj, torch.Tensor) else name


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
