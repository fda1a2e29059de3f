"""Recordings of this machine as if it were a card, as a CUDA graph makes them: of operations, and of the memory that
they read and wrote.

Python runs once; a replay carries out the same operations on the same memory, and writes their results to where they
were. What a driver refuses while it records, to read an element, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.utils import _python_dispatch, _pytree

T = TypeVar("T")


class _Done(NamedTuple):
    """An operation that was carried out."""

    operation: Any
    args: Any
    kwargs: Any
    results: Any


class Recorded:
    """The recording of a function: see `batchopt_workers.shortcuts.recording.Recording`."""

    made: ClassVar[list[Any]] = []  # all of this process

    def __init__(self, device: torch.device) -> None:
        self.replays = 0
        self._tape: list[_Done] = []
        Recorded.made.append(self)

    def record(self, function: Callable[[], T]) -> T:
        function()
        with _Tape(self._tape):
            return function()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for operation, args, kwargs, results in self._tape:
            found = operation(*args, **kwargs)
            known = {_place(tensor) for tensor in tensors_in((args, kwargs))}
            for now, then in zip(tensors_in(found), tensors_in(results), strict=True):
                if _place(then) not in known:  # neither a view nor written in place
                    then.copy_(now)


class _Tape(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: list[_Done]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_masked = any(tensor.dtype == torch.bool for tensor in tensors_in(args[1:2]))
        waits = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if is_masked if func._schema.name.startswith("aten::index") else waits:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = func(*args, **kwargs)
        self._tape.append(_Done(func, *[_still(data) for data in (args, kwargs, found)]))
        return found


def tensors_in(data: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def _still(data: Any) -> Any:
    """The same memory, whatever the function makes of its tensors afterwards."""
    return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, data)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
