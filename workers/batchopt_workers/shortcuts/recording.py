"""Recording what a card does, to have it done again without the Python that asked for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recording(Protocol):
    """The work that a function does on a device, to be done again."""

    def record(self, function: Callable[[], T]) -> T:
        """Call a function, perhaps several times, and return what it returns. The tensors in that are overwritten by
        each replay. Raise `RuntimeError` for what cannot be recorded."""

    def replay(self) -> None:
        """Do the same again, with what is now in the memory that the function has read."""


class CudaRecording:
    """A CUDA graph: https://docs.nvidia.com/cuda/cuda-programming-guide, section "CUDA Graphs".

    All graphs of a device share one pool of memory, since one is replayed at a time. Random numbers are drawn as by
    the function itself: torch gives a replay the current seed and offset of the default generator, and moves it on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], T]) -> T:
        """See `Recording.record`: it is called once before, so that libraries are loaded and have their workspaces."""
        current = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            function()
        current.wait_stream(aside)
        generator: Any = torch.cuda.default_generators[self._device.index or 0]
        before = generator.clone_state()
        try:
            # what other threads do meanwhile, such as pinning memory for the next batch, does not concern the graph
            pool = GraphMemory.of(self._device)
            recording = torch.cuda.graph(self._graph, pool.handle, aside, capture_error_mode="thread_local")
            with without_collection(), adding_there(), recording:
                found = function()
            pool.users.add(self)
            return found
        except BaseException:
            generator.graphsafe_set_state(before)  # the old one may still believe that it is being captured
            raise

    def replay(self) -> None:
        """See `Recording.replay`."""
        self._graph.replay()


@contextmanager
def without_collection() -> Iterator[None]:
    """Have no garbage collected in the body: older graphs and pinned memory among it are freed by calls of the driver
    that end a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def can_add_there() -> bool:
    """Tell whether autograd can be told to add gradients up in the stream that is recorded, also by nodes of a graph
    from before, which belong to another one: without that, as in torch 2.11, such nodes end a recording."""
    return hasattr(torch.autograd.graph, "set_override_stale_capture_stream")


@contextmanager
def adding_there() -> Iterator[None]:
    """Tell it that in the body."""
    if not can_add_there():
        yield
        return
    before = torch._C._override_stale_capture_stream()
    torch.autograd.graph.set_override_stale_capture_stream(True)
    try:
        yield
    finally:
        torch.autograd.graph.set_override_stale_capture_stream(before)


class GraphMemory:
    """The memory that the graphs of a device share, as long as one of them lives: torch refuses a pool that had users,
    and has none left."""

    _of: ClassVar[dict[torch.device, GraphMemory]] = {}

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    @classmethod
    def of(cls, device: torch.device) -> GraphMemory:
        """Return the pool of a device, a new one if the last has no users."""
        found = cls._of.get(device)
        if found is None or not found.users:
            found = cls._of[device] = cls()
        return found


# How work is recorded, by the type of device.
RECORDINGS: dict[str, Callable[[torch.device], Recording]] = {"cuda": CudaRecording}
