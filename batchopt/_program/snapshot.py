"""A snapshot of an object graph by identity: tells in microseconds whether anything in it was replaced."""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copyreg import dispatch_table
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
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
import numpy as np
import torch

from batchopt_workers.data.packing import dumps
from batchopt_workers.data.structures import slots_of
from batchopt_workers.process.interrupts import let_through

# Types of immutable objects.
_PYTHONS = (
    NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    EllipsisType,
    CodeType,
    ModuleType,
    re.Pattern,
)
_DESCRIPTORS = (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
_TORCHS = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_ATOMS = frozenset((*_PYTHONS, *_DESCRIPTORS, *_TORCHS, type(NotImplemented)))
# Attributes of classes that belong to Python's own machinery.
_MACHINERY = frozenset(("_abc_impl", "__dict__", "__weakref__"))
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_requires_grad = attrgetter("requires_grad")


# A part of an object: the step to it, ".name", "[index]" or "" if it is obvious, and the part itself.
Part = tuple[str, Any]


class Met(NamedTuple):
    """A tensor that was found: its path, and whether a `torch.nn.Module`, or a class, is on that path."""

    path: str
    tensor: torch.Tensor
    in_module: bool
    in_class: bool


class _Item(NamedTuple):
    obj: Any
    path: str
    in_module: bool
    in_class: bool = False


class Snapshot:
    """Everything that pickling reaches from `roots`: attributes, items, what functions capture, and the globals used by
    functions that are sent by value.

    `tensors` are all that were found, each once; their elements are not inspected. Objects whose content Python cannot
    see are compared in pickled form. Never raises for an unusual object: then `holds` always returns False.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self.tensors: list[Met] = []
        self._requires_grad: list[bool] = []
        self._hidden = False  # whether something may change without being noticed
        self._empty: list[Any] = []
        self._dicts: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._others: list[tuple[Callable[[], Iterator[Any]], tuple[Any, ...]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._pickled: list[tuple[Any, bytes]] = []
        self._seen: dict[int, object] = {}  # kept alive, so that no identity is reused
        self._todo: list[_Item] = [_Item(obj, path, False) for path, obj in roots.items()]
        self._modules: list[_Item] = []  # visited last, so that what is also reached otherwise has that path
        self._classes: list[_Item] = []
        while queue := self._todo or self._modules or self._classes:
            self._visit(queue.pop())
        self._plain = [met.tensor for met in self.tensors]
        self._known = set(map(id, self._plain))

    def holds(self) -> bool:
        """Tell whether nothing was replaced; False if there is something that cannot be compared."""
        return not self._hidden and self.looks_the_same()

    def looks_the_same(self) -> bool:
        """Tell whether nothing was replaced, as far as it can be compared: references, arrays, pickled objects."""
        if not self.refers():
            return False
        if not (self._arrays or self._pickled):
            return True
        return all(_equal(array, copy) for array, copy in self._arrays) and all(
            _pickled(obj) == data for obj, data in self._pickled
        )

    def refers(self) -> bool:
        """Tell whether everything still refers to the same objects, and all `requires_grad` are unchanged."""
        if any(self._empty):
            return False
        for mapping, kept in self._dicts:
            if 2 * len(mapping) != len(kept) or not all(map(is_, chain(mapping, mapping.values()), kept)):
                return False
        for items, kept in self._lists:
            if len(items) != len(kept) or not all(map(is_, items, kept)):
                return False
        for read, kept in self._others:
            found = tuple(read())
            if len(found) != len(kept) or not all(map(is_, found, kept)):
                return False
        return [*map(_requires_grad, self._plain)] == self._requires_grad

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor was found; otherwise pickling has made it from something else."""
        return id(tensor) in self._known

    # ---- the walk

    def _visit(self, item: _Item) -> None:
        obj = item.obj
        if type(obj) in _ATOMS or isinstance(obj, (Enum, np.generic)) or id(obj) in self._seen:
            return
        if isinstance(obj, torch.nn.Module) and not item.in_module:
            self._modules.append(item._replace(in_module=True))
            return
        self._seen[id(obj)] = obj
        try:
            self._look_inside(item)
        except Exception as error:  # raised by a class of the user that is inspected
            let_through(error)
            self._hidden = True

    def _look_inside(self, item: _Item) -> None:
        obj = item.obj
        if isinstance(obj, torch.Tensor):
            self._see_tensor(item)
        elif isinstance(obj, (FunctionType, type)) and _is_imported(obj):
            return
        elif isinstance(obj, FunctionType):
            self._read(item, functools.partial(of_function, obj))
        elif isinstance(obj, type):
            self._read(item, functools.partial(of_class, obj))
        elif isinstance(obj, MethodType):
            self._push(item, (("", obj.__func__), ("", obj.__self__)))
        elif isinstance(obj, functools.partial):
            self._push(item, (("", obj.func), (".args", obj.args), (".keywords", obj.keywords), ("", vars(obj))))
        elif isinstance(obj, (staticmethod, classmethod, property)):
            self._push(item, of_descriptor(obj))
        elif isinstance(obj, CellType):
            self._read(item, functools.partial(_of_cell, obj))
        elif isinstance(obj, (dict, list, tuple, set, frozenset, deque)):
            self._see_container(item)
        elif isinstance(obj, np.ndarray) and obj.dtype.kind not in "OV":
            self._arrays.append((obj, obj.copy()))
        else:
            self._see_instance(item)

    def _push(self, item: _Item, parts: Any) -> None:
        for step, part in parts:
            if type(part) not in _ATOMS:
                self._todo.append(
                    _Item(part, item.path + step, item.in_module, item.in_class or isinstance(item.obj, type))
                )

    def _read(self, item: _Item, read: Callable[[], Iterator[Part]]) -> None:
        """Record what `read` yields now, and must yield again."""
        parts = list(read())

        def values() -> Iterator[Any]:
            return (value for _, value in read())

        self._others.append((values, tuple(value for _, value in parts)))
        self._push(item, parts)

    def _see_tensor(self, item: _Item) -> None:
        tensor = item.obj
        self.tensors.append(Met(item.path, tensor, item.in_module, item.in_class))
        self._requires_grad.append(tensor.requires_grad)
        if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) not in _TENSORS:
            self._hidden = True  # its elements are pickled
        self._see_dict(vars(tensor))
        self._push(item, ((f".{name}", value) for name, value in vars(tensor).items()))

    def _see_dict(self, mapping: dict[Any, Any]) -> None:
        if mapping:
            self._dicts.append((mapping, (*mapping, *mapping.values())))
        else:
            self._empty.append(mapping)

    def _see_container(self, item: _Item) -> None:
        obj = item.obj
        if isinstance(obj, dict):
            self._see_dict(obj)
        elif not isinstance(obj, (tuple, frozenset)):
            self._lists.append((obj, tuple(obj)))
        self._push(item, of_container(obj))
        self._see_attributes(item)

    def _see_attributes(self, item: _Item) -> bool:
        """Record the attributes, and return whether there are any."""
        obj, found = item.obj, False
        attributes = getattr(obj, "__dict__", None)
        if isinstance(attributes, dict):
            found = True
            self._see_dict(attributes)
            for name, value in attributes.items():
                if isinstance(obj, torch.nn.Module) and name in _OF_MODULES and isinstance(value, dict):
                    self._see_dict(value)
                    self._push(item, ((f".{key}", part) for key, part in value.items()))
                else:
                    self._push(item, ((f".{name}", value),))
        kind: type = type(obj)
        slots = slots_of(kind)
        if slots:
            found = True
            self._read(item, functools.partial(_of_slots, obj, slots))
        return found

    def _see_instance(self, item: _Item) -> None:
        obj = item.obj
        kind = type(obj)
        if not _is_imported(kind):
            self._classes.append(_Item(kind, item.path, item.in_module))
        seen = self._see_attributes(item)
        own_way = kind in dispatch_table or any(
            getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__")
        )
        if isinstance(obj, torch.nn.Module) or (seen and not own_way):
            return
        data = _pickled(obj)
        if data is None:
            self._hidden = True
        else:
            self._pickled.append((obj, data))


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _pickled(obj: object) -> bytes | None:
    try:
        return dumps(obj)
    except Exception as error:
        let_through(error)
        return None


def _equal(array: Any, copy: Any) -> bool:
    same = array.shape == copy.shape and array.dtype == copy.dtype
    return same and (array.tobytes() == copy.tobytes() if array.size else True)


def _is_imported(obj: Any) -> bool:
    """Tell whether it is pickled by name, and so imported by the receiver."""
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


def of_function(function: FunctionType) -> Iterator[Part]:
    """Yield the parts of a function that is pickled by value."""
    code = function.__code__
    yield "", code
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield f".{name}", _contents(cell)
    for name in names_of_globals(code):
        yield f".{name}", function.__globals__.get(name, _MISSING)
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


def of_descriptor(obj: staticmethod[..., Any] | classmethod[Any, ..., Any] | property) -> Iterator[Part]:
    """Yield the functions of a descriptor."""
    functions = (obj.fget, obj.fset, obj.fdel) if isinstance(obj, property) else (obj.__func__,)
    return (("", function) for function in functions)


def of_container(obj: Any) -> Iterator[Part]:
    """Yield the items of a dict, with their keys, or of another container."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{key!r}]", value
            yield f"[{key!r}]", key
    else:
        for index, value in enumerate(obj):
            yield f"[{index}]", value


def _of_cell(cell: CellType) -> Iterator[Part]:
    yield "", _contents(cell)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _MISSING


def _of_slots(obj: Any, names: tuple[str, ...]) -> Iterator[Part]:
    for name in names:
        yield f".{name}", getattr(obj, name, _MISSING)


@functools.lru_cache(maxsize=1024)
def names_of_globals(code: CodeType) -> tuple[str, ...]:
    """Return the global variables that the code uses, including the functions within it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(names_of_globals(constant))
    return tuple(sorted(names))
