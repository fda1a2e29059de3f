"""The graph of the user's objects: the parts of one object, and one walk through everything that some refer to.

Whoever looks into the user's objects (for changes, for tensors, for what cannot be pickled) goes along these parts, so
that all see the same objects under the same names. A path is what the user would write, without the names that torch
gives to its own containers.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import cloudpickle
import torch

from batchopt_workers.wire.structures import slots_of

# Types of immutable objects, which have no parts.
_PYTHONS = (NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, type(NotImplemented))
_NAMED = (CodeType, ModuleType, re.Pattern, BuiltinFunctionType)
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType)
_TORCHS = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
ATOMS = frozenset((*_PYTHONS, *_NAMED, *_DESCRIPTORS, *_TORCHS))
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Attributes of classes that belong to Python's own machinery.
_MACHINERY = frozenset(("_abc_impl", "__dict__", "__weakref__"))
# Dicts of a module whose items are its attributes as well.
OF_MODULES = ("_parameters", "_buffers", "_modules")
MISSING = object()

# A part of an object: the step to it, ".name", "[index]" or "" if it is obvious, and the part itself.
Part = tuple[str, Any]


class Found(NamedTuple):
    """An object that a walk has come to by a `step` from that `above`. `in_module`, `in_class`: there is a module, or a
    class, on the way."""

    obj: Any
    step: str
    above: Found | None = None
    depth: int = 0
    in_module: bool = False
    in_class: bool = False

    @property
    def path(self) -> str:
        """The steps from the root to it."""
        steps, found = [self.step], self.above
        while found is not None:
            steps.append(found.step)
            found = found.above
        return "".join(reversed(steps))


def walk(
    roots: Mapping[str, object], visit: Callable[[Found], Iterable[Part]], again: tuple[type, ...] = ()
) -> dict[int, object]:
    """Visit everything that `roots` refer to, and return it by identity: `visit` returns the parts to go on with.

    Each object is visited once, by a shortest path, and those of the types `again` on each path. Modules come after
    what is reached without them, and classes last, so that their parts have the other path if there is one.
    """
    seen: dict[int, object] = {}
    todo = deque(Found(obj, path) for path, obj in roots.items())
    modules: deque[Found] = deque()
    classes: deque[Found] = deque()
    while queue := todo or modules or classes:
        found = queue.popleft()
        obj = found.obj
        if id(obj) in seen and not isinstance(obj, again):
            continue
        if isinstance(obj, torch.nn.Module) and not found.in_module:
            modules.append(found._replace(in_module=True))
            continue
        seen[id(obj)] = obj
        depth, in_module, in_class = found.depth + 1, found.in_module, found.in_class or isinstance(obj, type)
        for step, part in visit(found):
            (classes if isinstance(part, type) else todo).append(Found(part, step, found, depth, in_module, in_class))
    return seen


def parts_of(obj: Any) -> Iterator[Part]:
    """Yield the objects that `obj` refers to and that pickling it by value would send."""
    if type(obj) in CONTAINERS:
        return of_container(obj)
    if isinstance(obj, FunctionType):
        return of_function(obj)
    if isinstance(obj, type):
        return of_class(obj)
    if isinstance(obj, MethodType):
        return iter((("", obj.__func__), (".self", obj.__self__)))
    if isinstance(obj, CellType):
        return iter((("", _contents(obj)),))
    if isinstance(obj, property):
        return iter((("", obj.fget), ("", obj.fset), ("", obj.fdel)))
    if isinstance(obj, (staticmethod, classmethod)):
        return iter((("", obj.__func__),))
    return _of_instance(obj)


def _of_instance(obj: Any) -> Iterator[Part]:
    if isinstance(obj, CONTAINERS):
        yield from of_container(obj)
    elif isinstance(obj, functools.partial):
        yield from (("", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    dicts = dicts_of(obj)
    for mapping in dicts:
        for name, value in mapping.items():
            if len(dicts) == 1 or name not in OF_MODULES:
                yield f".{name}", value
    kind: type = type(obj)
    for name in slots_of(kind):
        yield f".{name}", getattr(obj, name, MISSING)


def dicts_of(obj: Any) -> tuple[dict[Any, Any], ...]:
    """Return the dicts that hold the attributes of an object: of a module four, if torch.jit has not made it."""
    own = getattr(obj, "__dict__", None)
    if not isinstance(own, dict):
        return ()
    if isinstance(obj, torch.nn.Module):
        dicts: tuple[Any, ...] = own, *[own.get(name) for name in OF_MODULES]
        if all(isinstance(found, dict) for found in dicts):
            return dicts
    return (own,)


def of_container(obj: Any) -> Iterator[Part]:
    """Yield the items of a dict, with their keys, or of another container."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{key!r}]", value
            yield f"[{key!r}]", key
    else:
        for index, value in enumerate(obj):
            yield f"[{index}]", value


def of_function(function: FunctionType) -> Iterator[Part]:
    """Yield the parts of a function that is pickled by value."""
    code = function.__code__
    yield "", code
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield f".{name}", _contents(cell)
    for name in names_of_globals(code):
        yield f".{name}", function.__globals__.get(name, MISSING)
    defaults = function.__defaults__ or ()
    for name, value in zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False):
        yield f".{name}", value
    for state in (function.__kwdefaults__ or {}, vars(function), function.__annotations__):
        for name, value in state.items():
            yield f".{name}", value


def of_class(kind: type) -> Iterator[Part]:
    """Yield the parts of a class that is pickled by value; it gets its own machinery when it is unpickled."""
    for name, value in vars(kind).items():
        if name not in _MACHINERY and not isinstance(value, MemberDescriptorType):
            yield f".{name}", value
    for base in kind.__bases__:
        yield "", base


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return MISSING


@functools.lru_cache(maxsize=1024)
def names_of_globals(code: CodeType) -> tuple[str, ...]:
    """Return the global variables that the code uses, including the functions within it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(names_of_globals(constant))
    return tuple(sorted(names))


def is_imported(obj: Any) -> bool:
    """Tell whether a function or class is pickled by name, and so imported by the receiver."""
    name = getattr(obj, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__":
        return False
    registered = cloudpickle.list_registry_pickle_by_value()
    parts = str(name).split(".")
    if any(".".join(parts[: i + 1]) in registered for i in range(len(parts))):
        return False
    found: Any = module
    for step in obj.__qualname__.split("."):
        found = getattr(found, step, None)
    return found is obj
