"""Structures of tensors: nested tuples, lists, mappings and dataclasses, and their copies."""

from __future__ import annotations

import cmath
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch


def is_tensor(item: Any) -> bool:
    """Tell whether it is a tensor."""
    return isinstance(item, torch.Tensor)


def map_tensors(function: Callable[[Any], Any], data: Any, is_leaf: Callable[[Any], bool] = is_tensor) -> Any:
    """Apply `function` to every tensor (or other leaf) of a structure of tuples, lists, mappings and dataclasses, which
    keep their types; everything else stays."""
    if is_leaf(data):
        return function(data)
    if isinstance(data, tuple) and hasattr(data, "_make"):
        return data._make(map_tensors(function, item, is_leaf) for item in data)
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(function, item, is_leaf) for item in data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(function, item, is_leaf) for key, item in data.items()}
        if is_tensordict(data):
            return _of_samples(data, mapped)
        return _filled(data, mapped) if _keeps_its_type(data) else mapped
    if is_record(data):
        return _replaced(data, {name: map_tensors(function, item, is_leaf) for name, item in items_of(data)})
    return data


def is_record(data: Any) -> bool:
    """Tell whether it is an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def items_of(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a tuple, list, mapping or dataclass with their indices, keys or names; otherwise nothing."""
    if isinstance(data, (tuple, list)):
        yield from enumerate(data)
    elif isinstance(data, Mapping):
        yield from data.items()
    elif is_record(data):
        for entry in dataclasses.fields(data):
            if hasattr(data, entry.name):
                yield entry.name, getattr(data, entry.name)


def _keeps_its_type(data: Mapping[Any, Any]) -> bool:
    return type(data) is not dict and isinstance(data, MutableMapping)


def _filled(data: Any, items: dict[Any, Any]) -> Any:
    found = copy.copy(data)
    for key, item in items.items():
        found[key] = item
    return found


def is_tensordict(data: Any) -> bool:
    """Tell whether it is an object of the library tensordict, whose entries all have its batch size."""
    return hasattr(data, "auto_batch_size_")


def can_be_cut(data: Any) -> bool:
    """Tell whether it is a TensorDict whose entries are in this process's memory, or an entry without tensors."""
    if not isinstance(data, Mapping):
        return _has_no_tensors(data)
    return not hasattr(data, "tensordicts") and not data.is_memmap()  # type: ignore[attr-defined]


def _has_no_tensors(item: Any) -> bool:
    return type(item).__name__ == "NonTensorData"


def _of_samples(data: Any, items: dict[str, Any]) -> Any:
    """Return a TensorDict like `data` with other entries: its batch size is that of as many of their dimensions, less
    those that they have lost, as one sample has; the first one where `data` itself has no tensors."""
    items = {key: item.data if _has_no_tensors(item) else item for key, item in items.items()}
    before, after = next(tensors_in(data), None), next(tensors_in(items), None)
    if after is None:
        return type(data)(items, batch_size=[])
    lost = 0 if before is None else before.dim() - after.dim()
    sizes = after.shape[: 1 if before is None else max(data.batch_dims - lost, 0)]
    names = data.names[lost:] if any(data.names) else None
    return type(data)(items, batch_size=sizes, names=names, device=data.device and after.device)


def _replaced(data: Any, items: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with other values; also of frozen ones, and of those whose `__init__` does more."""
    found = copy.copy(data)
    for name, item in items.items():
        object.__setattr__(found, name, item)
    return found


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of such a structure, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    else:
        for _, item in items_of(data):
            yield from tensors_in(item)


# Types that contain no tensors.
PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def has_a_row_each(item: Any, samples: int) -> bool:
    """Tell whether it is a list, tuple or array of things other than tensors, one per sample."""
    if isinstance(item, np.ndarray):
        return item.ndim > 0 and len(item) == samples
    if (not isinstance(item, list) and type(item) is not tuple) or len(item) != samples:
        return False
    return PLAIN.issuperset(map(type, item)) or next(tensors_in(item), None) is None


def holds_rows(data: Any) -> bool:
    """Tell whether there is a list, tuple or array of things other than tensors, which may have one for each sample."""
    if isinstance(data, np.ndarray):
        return data.ndim > 0
    if isinstance(data, (list, tuple)) and has_a_row_each(data, len(data)):
        return True
    return any(holds_rows(item) for _, item in items_of(data))


@lru_cache(maxsize=1024)
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that instances of a class keep in `__slots__`, inherited ones too."""
    found: list[str] = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                mangled = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
                found.append(mangled)
    # a property may stand in the place of a base's slot, as in Python 3.13's `pathlib`
    return tuple(name for name in found if isinstance(getattr(kind, name, None), MemberDescriptorType))


def same_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Tell whether shapes, dtypes and all elements are equal; NaN equals NaN."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    with torch.no_grad():
        return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())


def all_finite(vector: torch.Tensor) -> bool:
    """Tell whether all elements of a vector are finite. A sum of squares of finite terms is finite unless it overflows,
    so one cheap pass is usually enough."""
    return cmath.isfinite(vector.dot(vector).item()) or bool(vector.isfinite().all())
