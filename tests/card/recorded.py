"""Recordings of the simulated card, or of the CPU as one, as a CUDA graph makes them: of operations, and of the memory
that they read and wrote.

Python runs once; a replay carries out the same operations on the same memory, and writes their results to where they
were. What a driver refuses while it records is refused: reading an element, and copies from and to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from threading import get_ident
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.utils import _python_dispatch, _pytree

T = TypeVar("T")


class Recorded:
    """The recording of a function on the simulated card: see `batchopt_workers.shortcuts.recording.Recording`."""

    made: ClassVar[list[Any]] = []  # all of this process

    def __init__(self, device: torch.device) -> None:
        self.replays = 0
        self._device = device
        self._tape: list[_Done] = []
        Recorded.made.append(self)

    def record(self, function: Callable[[], T]) -> T:
        function()
        with _Tape(self._tape, self._device.type):
            return function()

    def replay(self) -> None:
        self.replays += 1
        for thread, part in groupby(self._tape, key=lambda done: done.thread):
            if thread == get_ident():
                _again(part)
            else:  # of the backward, whose number of threads, and so its bits, may be another one
                start = torch.zeros(1, device=self._device, requires_grad=True)
                _There.apply(start, [*part]).backward()  # type: ignore[no-untyped-call]


class _Done(NamedTuple):
    """An operation that was carried out in a thread."""

    thread: int
    operation: Any
    args: Any
    kwargs: Any
    results: Any


def _again(done: Iterable[_Done]) -> None:
    with torch.no_grad():
        for _, operation, args, kwargs, results in done:
            found = operation(*args, **kwargs)
            known = {_place(tensor) for tensor in tensors_in((args, kwargs))}
            for now, then in zip(tensors_in(found), tensors_in(results), strict=True):
                if _place(then) not in known:  # neither a view nor written in place
                    then.copy_(now)


class _There(torch.autograd.Function):
    """Carries something out in the thread of the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, done: list[_Done]) -> torch.Tensor:
        ctx.done = done
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _again(ctx.done)
        return gradient, None


class _Tape(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: list[_Done], kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._kind = tape, kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_masked = any(tensor.dtype == torch.bool for tensor in tensors_in(args[1:2]))
        waits = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if is_masked if func._schema.name.startswith("aten::index") else waits:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = func(*args, **kwargs)
        if any(tensor.device.type != self._kind for tensor in tensors_in((args, kwargs, found))):
            raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")
        detached = [_still(data) for data in (args, kwargs, found)]
        self._tape.append(_Done(get_ident(), func, *detached))
        return found


def tensors_in(data: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def _still(data: Any) -> Any:
    """The same memory, whatever the function makes of its tensors afterwards."""
    return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, data)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
