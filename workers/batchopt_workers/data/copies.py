"""Copies of samples that share nothing with the originals."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from batchopt_workers.data.structures import PLAIN, is_record, map_tensors
from batchopt_workers.process.interrupts import let_through


class _Recorder(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def taken_apart(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the object pickled without its tensors, and the tensors. Raise whatever pickling it raises."""
    file = io.BytesIO()
    recorder = _Recorder(file)
    recorder.dump(obj)
    return file.getvalue(), recorder.tensors


def put_together(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the object, with these tensors in place of its own."""
    return _Unpickler(data, tensors).load()


def copy_of(data: Any) -> Any:
    """Return a copy with its own tensors (leaves), containers and other objects; an object that cannot be pickled is
    not copied."""
    return map_tensors(_own, data, lambda item: not (isinstance(item, (tuple, list, Mapping)) or is_record(item)))


def _own(item: Any) -> Any:
    if type(item) in PLAIN:
        return item
    if isinstance(item, torch.Tensor):
        return item.detach().clone().requires_grad_(item.requires_grad)
    try:
        data, tensors = taken_apart(item)
    except Exception as error:  # whatever the user's classes raise
        let_through(error)
        return item
    return put_together(data, [_own(tensor) for tensor in tensors])
