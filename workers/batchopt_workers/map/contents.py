"""A record of what the parts of a program hold, by identity, so that changes by the user's code can be undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from batchopt_workers.data.structures import PLAIN, slots_of
from batchopt_workers.map.buffers import LARGEST_STATISTIC

_NOT_LOOKED_INTO = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
_MISSING = object()

Undo = Callable[[], object]


class Contents:
    """The classes and attributes of modules and other objects, the items of their containers, the `requires_grad` of
    their tensors, and the elements of NumPy arrays of up to `LARGEST_STATISTIC`. What functions capture, and the
    elements of tensors, are not recorded; `tensors` lists the tensors found."""

    def __init__(self, roots: Iterable[object]) -> None:
        self._empty: list[Any] = []
        self._dicts: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._slots: list[tuple[object, dict[str, Any]]] = []
        self._owners: list[Any] = []  # objects with attributes
        self._classes: list[type] = []
        self._arrays: list[tuple[Any, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, object] = {}  # kept alive, so that no identity is reused
        self._todo = [*roots]
        while self._todo:
            obj = self._todo.pop()
            if type(obj) not in PLAIN and id(obj) not in self._seen and not isinstance(obj, _NOT_LOOKED_INTO):
                self._seen[id(obj)] = obj
                self._look_inside(obj)
        self._leaves = [tensor for tensor in self.tensors if tensor.is_leaf]
        self._requires_grad = [leaf.requires_grad for leaf in self._leaves]

    def _look_inside(self, obj: Any) -> None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
        elif isinstance(obj, np.ndarray):
            if obj.size <= LARGEST_STATISTIC:
                self._arrays.append((obj, obj.copy()))
        elif isinstance(obj, dict):
            self._see_dict(obj)
        elif isinstance(obj, (list, deque)):
            self._lists.append((obj, tuple(obj)))
            self._todo.extend(obj)
        elif isinstance(obj, (tuple, frozenset)):
            self._todo.extend(obj)
        elif isinstance(obj, set):
            self._sets.append((obj, set(obj)))
            self._todo.extend(obj)
        kind: type = type(obj)
        if slots_of(kind):
            before = _in_slots(obj, slots_of(kind))
            self._slots.append((obj, before))
            self._todo.extend(before.values())
        attributes = getattr(obj, "__dict__", None)
        if isinstance(attributes, dict):
            self._owners.append(obj)
            self._classes.append(kind)
            self._see_dict(attributes)

    def _see_dict(self, mapping: dict[Any, Any]) -> None:
        if mapping:
            self._dicts.append((mapping, (*mapping, *mapping.values())))
            self._todo.extend(mapping.values())
        else:
            self._empty.append(mapping)

    def changes(self) -> list[Undo]:
        """Return a function for each change since, which undoes it."""
        found: list[Undo] = [mapping.clear for mapping in self._empty if mapping]
        if not all(map(is_, map(type, self._owners), self._classes)):
            pairs = zip(self._owners, self._classes, strict=True)
            found += [partial(setattr, obj, "__class__", kind) for obj, kind in pairs if type(obj) is not kind]
        for mapping, kept in self._dicts:
            if 2 * len(mapping) != len(kept) or not all(map(is_, chain(mapping, mapping.values()), kept)):
                found += _of_dict(mapping, kept)
        for items, kept in self._lists:
            if len(items) != len(kept) or not all(map(is_, items, kept)):
                found.append(partial(_fill, items, kept))
        found += [partial(_fill, items, before) for items, before in self._sets if items != before]
        for obj, before in self._slots:
            now = _in_slots(obj, before)
            found += [partial(_set_slot, obj, name, value) for name, value in before.items() if now[name] is not value]
        found += [partial(np.copyto, array, copy) for array, copy in self._arrays if not _same(array, copy)]
        if [leaf.requires_grad for leaf in self._leaves] != self._requires_grad:
            leaves = zip(self._leaves, self._requires_grad, strict=True)
            found += [partial(leaf.requires_grad_, requires_grad) for leaf, requires_grad in leaves]
        return found

    def put_back(self) -> None:
        """Undo all changes since."""
        for undo in self.changes():
            undo()


def _of_dict(mapping: dict[Any, Any], kept: tuple[Any, ...]) -> Iterable[Undo]:
    """Yield what restores the dict; item by item if its keys are the same, since other items may change until then."""
    keys, values = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    if len(mapping) == len(keys) and all(map(is_, mapping, keys)):
        for key, value in zip(keys, values, strict=True):
            if mapping[key] is not value:
                yield partial(mapping.__setitem__, key, value)
    else:
        yield partial(_refill, mapping, dict(zip(keys, values, strict=True)))


def _refill(mapping: dict[Any, Any], before: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(before)


def _fill(items: Any, before: Any) -> None:
    items.clear()
    (items.update if isinstance(items, set) else items.extend)(before)


def _in_slots(obj: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(obj, name, _MISSING) for name in names}


def _set_slot(obj: object, name: str, value: Any) -> None:
    if value is not _MISSING:
        object.__setattr__(obj, name, value)
    elif hasattr(obj, name):  # a class that was pickled by value may keep it in a dict
        object.__delattr__(obj, name)


def _same(array: Any, copy: Any) -> bool:
    return bool(array.tobytes() == copy.tobytes())
