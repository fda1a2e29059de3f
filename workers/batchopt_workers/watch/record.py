"""A record, by identity, of what the user's objects hold: it tells in microseconds whether anything was replaced, and
takes changes back.

References are compared in C (`is_` over the items of dicts and lists), since a step compares all of them; pickling
again would take a thousand times as long. Elements of tensors are never looked at here: whoever shares or restores them
knows about them, and finds the tensors of a module by `tensors_of`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copyreg import dispatch_table
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from batchopt_workers.watch.graph import ATOMS, MISSING, Found, Part, dicts_of, is_imported, parts_of, walk
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.packing import dumps
from batchopt_workers.wire.structures import slots_of

_CALLED = (FunctionType, MethodType, partial, staticmethod, classmethod, property, type)
_BY_NAME = (FunctionType, type)
_DICTS = frozenset((dict, OrderedDict))
_SINGLES = (Enum, np.generic)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_requires_grad = attrgetter("requires_grad")

Undo = Callable[[], object]


class FoundTensor(NamedTuple):
    """A tensor that was found: its path, and whether a `torch.nn.Module`, or a class, is on that path."""

    path: str
    tensor: torch.Tensor
    in_module: bool
    in_class: bool


class Record:
    """Everything that `roots`, by name, refer to: attributes, items, elements of NumPy arrays, classes of objects and
    the `requires_grad` of `tensors`, each of which is listed once.

    With `functions` it has all that pickling reaches: also what functions capture, the globals that are sent with them,
    and in pickled form the objects whose content Python cannot see. Without, it has what can be taken back, so no
    arrays of more than `LARGEST_STATISTIC`. Never raises for an unusual object: then `holds` always returns False.
    """

    def __init__(self, roots: Mapping[str, object], functions: bool) -> None:
        self._functions = functions
        self.tensors: list[FoundTensor] = []
        self._hidden = False  # whether something may change without being noticed
        self._empty: list[dict[Any, Any]] = []
        self._dicts: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []  # and deques and sets
        # objects, and the values of these slots; without names, all parts of a function, a class or a cell
        self._read: list[tuple[Any, tuple[str, ...], tuple[Any, ...]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._pickled: list[tuple[Any, bytes]] = []
        self._classes: tuple[list[Any], list[type]] = [], []
        self._seen = walk(roots, self._visit)  # kept alive, so that no identity is reused
        tensors = [found.tensor for found in self.tensors if functions or found.tensor.is_leaf]
        self._trained = tensors, [*map(_requires_grad, tensors)]

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
        objects, classes = self._classes
        tensors, requires_grad = self._trained
        if any(self._empty) or [*map(type, objects)] != classes:
            return False
        for mapping, kept in self._dicts:
            if 2 * len(mapping) != len(kept) or not all(map(is_, chain(mapping, mapping.values()), kept)):
                return False
        for items, kept in self._lists:
            if len(items) != len(kept) or not all(map(is_, items, kept)):
                return False
        for obj, names, kept in self._read:
            found = _values(obj, names)
            if len(found) != len(kept) or not all(map(is_, found, kept)):
                return False
        return [*map(_requires_grad, tensors)] == requires_grad

    def changes(self) -> list[Undo]:
        """Return a function for each change since, which undoes it; of a record without functions."""
        if self.looks_the_same():
            return []
        found: list[Undo] = [mapping.clear for mapping in self._empty if mapping]
        pairs = zip(*self._classes, strict=True)
        found += [partial(setattr, obj, "__class__", kind) for obj, kind in pairs if type(obj) is not kind]
        for mapping, kept in self._dicts:
            found += _of_dict(mapping, kept)
        found += [partial(_fill, items, kept) for items, kept in self._lists if not _are_same(items, kept)]
        for obj, names, kept in self._read:
            slots = zip(names, kept, _values(obj, names), strict=True)
            found += [partial(_set_slot, obj, name, value) for name, value, now in slots if now is not value]
        found += [partial(np.copyto, array, copy) for array, copy in self._arrays if not _equal(array, copy)]
        leaves = zip(*self._trained, strict=True)
        found += [partial(leaf.requires_grad_, flag) for leaf, flag in leaves if leaf.requires_grad is not flag]
        return found

    def put_back(self) -> None:
        """Undo all changes since."""
        for undo in self.changes():
            undo()

    # ---- the walk

    def _visit(self, found: Found) -> Iterable[Part]:
        parts: list[Part] = []
        try:
            for part in () if type(found.obj) in ATOMS else self._look_inside(found):
                kind, obj = type(part[1]), part[1]
                if kind in _DICTS and not obj:  # as most dicts of hooks
                    self._empty.append(obj)
                elif kind not in ATOMS and not isinstance(obj, _SINGLES):
                    parts.append(part)
        except Exception as error:  # raised by a class of the user that is inspected
            let_through(error)
            self._hidden = True
        return parts

    def _look_inside(self, found: Found) -> Iterable[Part]:
        """Record an object, and return its parts."""
        obj = found.obj
        if isinstance(obj, _CALLED) and (not self._functions or (isinstance(obj, _BY_NAME) and is_imported(obj))):
            return ()
        if isinstance(obj, np.ndarray) and (obj.dtype.kind not in "OV" or not self._functions):
            if self._functions or obj.size <= LARGEST_STATISTIC:
                self._arrays.append((obj, obj.copy()))
        elif isinstance(obj, torch.Tensor):
            self.tensors.append(FoundTensor(found.path, obj, found.in_module, found.in_class))
            # else its elements are pickled
            is_plain = obj.layout is torch.strided and not obj.is_quantized and type(obj) in _TENSORS
            self._hidden = self._hidden or not is_plain
        elif isinstance(obj, (FunctionType, type, CellType)):
            self._read.append((obj, (), _values(obj, ())))
            return parts_of(obj)
        elif isinstance(obj, dict):
            self._see_dict(obj)
        elif isinstance(obj, (list, deque, set)):
            self._lists.append((obj, tuple(obj)))
        elif not isinstance(obj, (*_CALLED, tuple, frozenset)):
            return self._of_instance(obj)
        self._see_attributes(obj)
        return parts_of(obj)

    def _see_dict(self, mapping: dict[Any, Any]) -> None:
        if mapping:
            self._dicts.append((mapping, (*mapping, *mapping.values())))
        else:
            self._empty.append(mapping)

    def _see_attributes(self, obj: Any) -> bool:
        """Record the attributes, and return whether there can be any."""
        dicts = dicts_of(obj)
        kind: type = type(obj)
        for mapping in dicts:
            self._see_dict(mapping)
        if slots := slots_of(kind):
            self._read.append((obj, slots, _values(obj, slots)))
        return bool(dicts or slots)

    def _of_instance(self, obj: Any) -> Iterable[Part]:
        kind, seen = type(obj), self._see_attributes(obj)
        if seen:
            self._classes[0].append(obj)
            self._classes[1].append(kind)
        if not self._functions:
            return parts_of(obj)
        own_way = kind in dispatch_table or any(
            getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__")
        )
        if not isinstance(obj, torch.nn.Module) and (own_way or not seen):
            data = _pickled(obj)
            if data is None:
                self._hidden = True
            else:
                self._pickled.append((obj, data))
        return chain(parts_of(obj), () if is_imported(kind) else (("", kind),))


def _values(obj: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    if names:
        return tuple([getattr(obj, name, MISSING) for name in names])
    return tuple([part for _, part in parts_of(obj)])


def _pickled(obj: object) -> bytes | None:
    try:
        return dumps(obj)
    except Exception as error:
        let_through(error)
        return None


def _equal(array: Any, copy: Any) -> bool:
    same = array.shape == copy.shape and array.dtype == copy.dtype
    return same and (array.tobytes() == copy.tobytes() if array.size else True)


def _are_same(items: Any, kept: tuple[Any, ...]) -> bool:
    """Tell whether a list has the same items, or a set in any order."""
    if isinstance(items, set):
        return items == set(kept)
    return len(items) == len(kept) and all(map(is_, items, kept))


def _of_dict(mapping: dict[Any, Any], kept: tuple[Any, ...]) -> Iterable[Undo]:
    """Yield what restores the dict; item by item if its keys are the same, since other items may change until then."""
    keys, values = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    if len(mapping) == len(keys) and all(map(is_, mapping, keys)):
        for key, value, now in zip(keys, values, mapping.values(), strict=True):  # a subclass may read keys otherwise
            if now is not value:
                yield partial(mapping.__setitem__, key, value)
    else:
        yield partial(_refill, mapping, dict(zip(keys, values, strict=True)))


def _refill(mapping: dict[Any, Any], before: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(before)


def _fill(items: Any, before: tuple[Any, ...]) -> None:
    items.clear()
    (items.update if isinstance(items, set) else items.extend)(before)


def _set_slot(obj: object, name: str, value: Any) -> None:
    if value is not MISSING:
        object.__setattr__(obj, name, value)
    elif hasattr(obj, name):  # a class that was pickled by value may keep it in a dict
        object.__delattr__(obj, name)


# In elements. A larger tensor is a constant (data kept with the module): all workers share one copy, and a forward
# that writes it raises an error.
LARGEST_STATISTIC = 2**20


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Yield every tensor that a part of `module` has as a buffer, parameter or attribute: its path, the part, its name
    there, and the tensor; tied tensors once per place."""
    for path, owner in module.named_modules():
        for holder in (owner._buffers, owner._parameters, vars(owner)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}".lstrip("."), owner, name, value


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of its elements, each once, as real numbers: without the dimensions along which it is expanded."""
    if 0 not in tensor.stride() and not tensor.is_complex():
        return tensor
    tensor = tensor.detach()
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
