"""Recording what a card does, to have it done again without the Python that asked for it.

A recording that fails may leave the driver in disorder, and one that succeeds may have taken a number from Python that
is another one the next time. So before, an eager evaluation is a `Rehearsal`, in which every operation is looked at.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchopt_workers.life.torch_settings import module_hooks
from batchopt_workers.wire.structures import tensors_in

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


_OF_DATA = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
# Operations that take a list of indices, and wait for elements only where one of these is a mask.
_BY_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_MASKS = torch.bool, torch.uint8


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, look for an `obstacle` to recording, which is None as long as there is none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self.obstacle: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and carry it out."""
        given = {} if kwargs is None else kwargs
        found = func(*args, **given)
        if self.obstacle is None:
            self.obstacle = self._obstacle(func, (args, given), found)
        return found

    def _obstacle(self, func: Any, given: Any, found: Any) -> str | None:
        name = func._schema.name.removeprefix("aten::")
        if name in _BY_INDICES:
            waits = any(index is not None and index.dtype in _MASKS for index in given[0][1])
        else:
            waits = any(tag in func.tags for tag in _OF_DATA)
        if waits:
            return f"'{name}' waits for elements (as .item(), an `if` of a tensor, or a boolean mask do)"
        if any(tensor.device.type != self._type for tensor in tensors_in((given, found))):
            return f"'{name}' uses a tensor that is not on the card (on the CPU, say, even if it is a single number)"
        return None


def obstacle_of(module: torch.nn.Module) -> str | None:
    """Return why evaluations of a module must not go without its Python, as far as that can be told from outside."""
    if torch.is_anomaly_enabled():
        return "torch detects anomalies"
    if any(isinstance(found, dict) and found for found in module_hooks().values()):
        return "there are hooks of all modules"
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"'{name}' was made by torch.jit"
        for registry, found in vars(part).items():
            if registry.endswith("_hooks") and registry.startswith(("_forward", "_backward")) and found:
                return f"'{name}' has hooks"
    return None


def is_held(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether something refers to an autograd graph of these parameters, such as an output that is kept: its nodes
    that add gradients up are used again by the next backward. Such a node keeps its metadata as long as anything refers
    to it."""
    mark = object()
    for parameter in parameters:
        if parameter.requires_grad:
            _metadata(parameter)[__name__] = mark
            if _metadata(parameter).pop(__name__, None) is mark:
                return True
    return False


def _metadata(parameter: torch.Tensor) -> Any:
    """Return the metadata of the node that adds up its gradients, which is made anew where nothing refers to it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node.metadata
