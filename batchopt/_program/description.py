"""A description of a program that is equal in every process with an equal program, for ranks to compare.

It has modes, plain values, names of types and digests of code, by path. It has no addresses, no order of sets, no
elements of tensors and no ids of hooks, which differ between processes; of a device only the type, since each rank has
one of its own.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any

import numpy as np
import torch

from batchopt._program.program import roots_of, snapshot_of
from batchopt_workers.data.graph import CONTAINERS, Found, Part, of_container, parts_of, walk
from batchopt_workers.data.memory import octets
from batchopt_workers.data.packing import dumps
from batchopt_workers.map.program import Program
from batchopt_workers.process.interrupts import let_through

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.Size)
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # among them the hooks, whose keys count those of the process
# Their objects have inner state that differs between processes: caches, counters, handles.
_OPAQUE = sys.stdlib_module_names | {"torch", "numpy"}
_DEVICE = re.compile(r"([a-z]+):\d+")
DEEPEST = 16
# Differences that are named in an error.
NAMED = 3

Description = dict[str, str]


class ComparedProgram:
    """A program as ranks compare it: without what forwards write, which depends on the share of each rank."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._written: set[str] = set()
        self._take()

    def _take(self) -> None:
        self._snapshot, self._parts = snapshot_of(self._program, hooks=False), describe(roots_of(self._program))
        self.digest = digest(self._compared(self._parts))

    def _compared(self, parts: Description) -> Description:
        inside = tuple(path + step for path in self._written for step in ".[")
        return {k: v for k, v in parts.items() if k not in self._written and not k.startswith(inside)}

    def resync(self) -> None:
        """Take over the user's changes."""
        if not self._snapshot.holds():
            self._take()

    def learn(self) -> None:
        """Learn what forwards have written, which ran on the user's own objects since the last call of `resync`."""
        if not self._snapshot.refers():
            before = self._parts
            self._take()
            self._learn(path for path, part in {*before.items()} ^ {*self._parts.items()})

    def _learn(self, written: Iterable[str]) -> None:
        self._written.update(_container(path) for path in written if not path.endswith(".training"))
        self.digest = digest(self._compared(self._parts))

    def tensors(self, trained: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those that f depends on beside the `trained` ones: parameters and buffers of all modules, and what
        functions capture."""
        ours, losses = set(map(id, trained)), (self._program.criterion, *self._program.loss_fns)
        modules = [m for m in (self._program.module, *losses) if isinstance(m, torch.nn.Module)]
        found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        found += [one.tensor for one in self._snapshot.tensors if not (one.in_module or one.in_class)]
        return [tensor for tensor in found if id(tensor) not in ours]

    @property
    def in_full(self) -> tuple[Description, set[str]]:
        """The description, and the paths that forwards write."""
        return self._parts, self._written

    def differing(self, of_all: Sequence[tuple[Description, set[str]]]) -> list[Description]:
        """Return the first parts in which these differ, of each."""
        for _, written in of_all:
            self._learn(written)
        compared = [self._compared(parts) for parts, _ in of_all]
        paths = sorted({path for one in compared for path, _ in {*one.items()} ^ {*compared[0].items()}})
        return [{path: one.get(path, "missing") for path in paths[:NAMED]} for one in compared]


def _container(path: str) -> str:
    """Return the path of the outermost container of an item: where a forward has written one, it may write others."""
    while path.endswith("]"):
        path = path[: path.rindex("[")]
    return path


def describe(roots: Mapping[str, object]) -> Description:
    """Return what can be compared of everything that `roots` refer to, by path. Never raises."""
    described: Description = {}

    def visit(found: Found) -> Iterable[Part]:
        try:
            described[found.path] = _summary(found.obj)
            return sorted(_parts(found.obj), key=itemgetter(0)) if found.depth < DEEPEST else ()
        except Exception as error:  # raised by a class of the user that is inspected
            let_through(error)
            return ()

    # equal containers are one object or several, as it happens in a process
    walk(roots, visit, again=(*_PLAIN, *CONTAINERS))
    return described


def digest(description: Description) -> str:
    """Return a short checksum of a description."""
    return hashlib.sha256(repr(sorted(description.items())).encode()).hexdigest()[:16]


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return the CRC-32 of the elements, in their order, and of shapes and dtypes."""
    found = 0
    for tensor in tensors:
        tensor = tensor.detach()
        found = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), found)
        if tensor.layout is torch.strided and not tensor.is_quantized:
            found = zlib.crc32(octets(tensor.cpu().resolve_conj().resolve_neg()).numpy().data, found)
    return f"{found:08x}"


def _summary(obj: object) -> str:
    """Describe an object without its parts."""
    if isinstance(obj, str):
        return _DEVICE.sub(r"\1", obj) if _DEVICE.fullmatch(obj) else repr(obj)
    if isinstance(obj, _PLAIN):
        return repr(obj)
    if isinstance(obj, (set, frozenset)):
        return repr(sorted(map(repr, obj))) if all(isinstance(item, _PLAIN) for item in obj) else "set"
    if isinstance(obj, torch.device):
        return obj.type
    if isinstance(obj, FunctionType):
        return f"{obj.__qualname__} {_digest_of(obj.__code__)}"
    if isinstance(obj, np.ndarray) and obj.dtype.kind not in "OV":
        return f"array {hashlib.sha256(np.ascontiguousarray(obj).data).hexdigest()[:16]}"
    kind = obj if isinstance(obj, type) else type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest_of(code: CodeType) -> str:
    constants = [_digest_of(c) if isinstance(c, CodeType) else _summary(c) for c in code.co_consts]
    parts = code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _parts(obj: Any) -> Iterator[Part]:
    """Yield the parts of an object that belong to the program."""
    if isinstance(obj, torch.nn.Module):
        yield ".training", obj.training
        yield from obj.named_children() if isinstance(obj, torch.jit.ScriptModule) else _of_module(obj)
    elif isinstance(obj, FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f".{name}", cell.cell_contents
        yield from ((f".default[{i}]", value) for i, value in enumerate(obj.__defaults__ or ()))
        yield from ((f".{name}", value) for name, value in (obj.__kwdefaults__ or {}).items())
    elif isinstance(obj, (MethodType, functools.partial)):
        yield from parts_of(obj)
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items() if isinstance(key, _PLAIN))
    elif isinstance(obj, (list, tuple, deque)):
        yield from of_container(obj)
    elif not isinstance(obj, (type, torch.Tensor, *_PLAIN)) and _is_open(obj):
        yield from _of_instance(obj)


def _of_module(module: torch.nn.Module) -> Iterator[Part]:
    yield from ((f".{name}", child) for name, child in module._modules.items())
    yield from ((f".{name}.requires_grad", p.requires_grad) for name, p in module._parameters.items() if p is not None)
    yield ".forward", type(module).forward
    yield from _of_instance(module)


def _of_instance(obj: Any) -> Iterator[Part]:
    yield from ((f".{name}", value) for name, value in vars(obj).items() if name not in _OF_MODULES)
    if callable(obj) and not isinstance(obj, torch.nn.Module):
        yield ".__call__", type(obj).__call__


def _is_open(obj: object) -> bool:
    """Tell whether the attributes of an instance make up what it is: not those of handles, loggers and the like."""
    kind = type(obj)
    if kind.__module__.partition(".")[0] in _OPAQUE or not hasattr(obj, "__dict__"):
        return False
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    try:
        dumps(obj)
    except Exception as error:
        let_through(error)
        return False
    return True
