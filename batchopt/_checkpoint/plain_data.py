"""Plain data: the permitted content of a checkpoint, copied without other memory, and digested to the last bit."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy
import torch

from batchopt.errors import CheckpointError

_DEEPEST = 100  # levels of nesting
_REPEATED = 10**5  # copies of lists and dicts that occur in several places
_WIDEST = 2040  # bits: torch.load(weights_only=True) cannot read longer integers

_SCALARS: dict[type, Callable[[Any], bytes]] = {
    NoneType: lambda _: b"",
    bool: lambda value: b"%d" % value,
    int: lambda value: b"%x" % value,
    float: struct.Struct("<d").pack,
    str: lambda value: value.encode("utf-8", "surrogatepass"),
}
_CONTAINERS = (list, tuple, dict, OrderedDict)


def copied(state: Any) -> Any:
    """Return `state` with its tensors on the CPU and without other memory of their storages.

    Numbers of NumPy become those of Python. Anything that occurs in several places is copied for each, except tensors.
    Raise `CheckpointError`, with the path to it, for anything but dicts, lists, tuples, dense tensors, numbers, bools,
    strings and None, or if there would be too many copies.
    """
    return _Copies().of(state, ("state",))


class _Copies:
    """Copies plain data without its tensors' other memory: a tensor that is all of its storage is not copied."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self._storages: set[tuple[Any, ...]] = set()
        self._seen: set[int] = set()
        self._repeated = 0

    def of(self, value: Any, where: tuple[str, ...]) -> Any:
        """Return the copy of `value`; raise `CheckpointError`, with its place `where`, if it is not plain data."""
        if len(where) > _DEEPEST:
            raise CheckpointError(f"{''.join(where[:4])}... contains itself, or is nested {_DEEPEST} deep")
        kind = type(value)
        if kind in _SCALARS or isinstance(value, numpy.generic):
            return _checked_scalar(value, where)
        if kind is torch.Tensor:
            return self._of_tensor(value, where)
        if kind in _CONTAINERS and value:
            self._repeated += id(value) in self._seen
            self._seen.add(id(value))
            if self._repeated > _REPEATED:
                raise CheckpointError(
                    f"{''.join(where[:4])}... is, or holds, lists or dicts in too many places at once"
                )
        if kind in (list, tuple):
            return kind(self.of(item, (*where, f"[{index}]")) for index, item in enumerate(value))
        if kind in (dict, OrderedDict):
            copy = kind(
                (_checked_scalar(key, (*where, " has a key that")), self.of(item, (*where, f"[{key!r}]")))
                for key, item in value.items()
            )
            if kind is OrderedDict:  # module.state_dict() notes the versions of its modules in an attribute
                vars(copy).update({name: self.of(item, (*where, f".{name}")) for name, item in vars(value).items()})
            return copy
        raise CheckpointError(f"{''.join(where)} is a {kind.__qualname__}, not plain data")

    def _of_tensor(self, tensor: torch.Tensor, where: tuple[str, ...]) -> torch.Tensor:
        if not _is_dense(tensor):
            raise CheckpointError(f"{''.join(where)} is a sparse, nested, quantized or meta tensor, not a dense one")
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        part = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        key = (*storage, *part)
        if key not in self._tensors:
            own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            # torch.save refuses a storage that is used with two dtypes
            if storage in self._storages or not _is_whole(own):
                own = own.clone()
            self._storages.add(storage)
            self._tensors[key] = own
        return self._tensors[key]


def _checked_scalar(value: Any, where: tuple[str, ...]) -> Any:
    if isinstance(value, numpy.generic):
        value = value.item()
    kind = type(value)
    if kind not in _SCALARS:
        raise CheckpointError(f"{''.join(where)} is a {kind.__qualname__}, not plain data")
    if kind is int and value.bit_length() >= _WIDEST:
        raise CheckpointError(f"{''.join(where)} is an integer of {_WIDEST} bits or more")
    return value


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is all of its storage, in row-major order."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _has_marks(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is more than its dtype, shape and memory."""
    return tensor.requires_grad or tensor.is_conj() or tensor.is_neg()


def digest(value: Any) -> str:
    """Return the sha256 of every type, key, dtype, shape and bit in plain data as `_Copies` makes it; raise
    `CheckpointError` for anything else, such as a list in two places: with nested ones it could take forever."""
    sha = hashlib.sha256()
    _feed(sha, value, set())
    return sha.hexdigest()


def _feed(sha: hashlib._Hash, value: Any, seen: set[int]) -> None:
    # each item starts with a line that tells its length, so that no two values make the same bytes
    kind = type(value)
    if kind in _CONTAINERS and value:
        if id(value) in seen:
            raise CheckpointError(f"it holds the same {kind.__qualname__} twice, which `write` would not have written")
        seen.add(id(value))
    if kind in _SCALARS:
        text = _SCALARS[kind](value)
        sha.update(f"{kind.__name__} {len(text)}\n".encode() + text)
    elif kind is torch.Tensor and _is_dense(value) and _is_whole(value) and not _has_marks(value):
        sha.update(f"{value.dtype} {list(value.shape)}\n".encode())
        octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value.untyped_storage())
        sha.update(octets.numpy().data)
    elif kind in (list, tuple):
        sha.update(f"{kind.__name__} {len(value)}\n".encode())
        for item in value:
            _feed(sha, item, seen)
    elif kind in (dict, OrderedDict):
        sha.update(f"{kind.__name__} {len(value)}\n".encode())
        for item in itertools.chain.from_iterable(value.items()):
            _feed(sha, item, seen)
        if kind is OrderedDict:
            _feed(sha, vars(value), seen)
    else:
        raise CheckpointError(f"it holds a {kind.__qualname__} that `write` would not have written")
