"""Pickling without the tensors, which cross the process boundary as shared memory.

`pack` pickles any object (functions, lambdas and local classes by value, through cloudpickle) and lists its tensors
instead of writing their bytes; `place` copies those into one shared block, once, and every worker's `unpack` builds the
object around views of that block. A trainable parameter is written as its index, and becomes a view of the worker's X:
tied parameters stay tied, and no parameter is ever sent.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils.parametrize import is_parametrized

from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.memory import SharedBlock, aligned
from batchopt_workers.wire.structures import PLAIN, is_record, map_tensors


@dataclass(frozen=True)
class Placement:
    """A tensor's place in the block, and its properties."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool

    def view(self, block: SharedBlock) -> torch.Tensor:
        """Return the tensor's place in `block`."""
        flat = block.tensor(self.dtype, (self.numel,), self.offset)
        return flat.as_strided(self.shape, self.stride)

    @property
    def numel(self) -> int:
        """Number of elements in memory, counting expanded dimensions once."""
        pairs = zip(self.shape, self.stride, strict=True)
        return torch.Size([1 if stride == 0 and size else size for size, stride in pairs]).numel()

    def empty(self) -> torch.Tensor:
        """Return uninitialised memory of this process for the tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def dressed(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in that memory, of its original kind."""
        if self.is_parameter:
            return torch.nn.Parameter(memory, requires_grad=self.requires_grad)
        return memory.requires_grad_() if self.requires_grad else memory


@dataclass(frozen=True)
class Packed:
    """An object separated from its tensors: `data` is sent, `tensors` are placed in shared memory."""

    data: bytes
    tensors: tuple[torch.Tensor, ...]
    placements: tuple[Placement, ...]
    nbytes: int

    def place(self, block: SharedBlock) -> list[torch.Tensor]:
        """Copy the tensors into `block` (at least `nbytes` long), and return its views of them, in order."""
        views = []
        for tensor, placement in zip(self.tensors, self.placements, strict=True):
            view = placement.view(block)
            copy_into(view, tensor)
            views.append(view)
        return views


def copy_into(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the elements of `tensor` to `view`, of the same shape; along expanded dimensions once."""
    tensor = tensor.detach()
    for dimension, (stride, size) in enumerate(zip(view.stride(), view.shape, strict=True)):
        if stride == 0 and size > 1:
            view, tensor = view.narrow(dimension, 0, 1), tensor.narrow(dimension, 0, 1)
    with torch.no_grad():
        view.copy_(tensor)


# Devices of tensors that can be sent; a meta tensor has no elements.
DEVICES = ("cpu", "meta")


def can_be_placed(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of this tensor can lie in shared memory; others are pickled."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle's class is untyped
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        main = sys.modules.get("__mp_main__")
        if main is not None and main.__name__ == "__mp_main__":  # of a process that multiprocessing has started
            cloudpickle.register_pickle_by_value(main)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            _check_device(obj)
        if isinstance(obj, SCRIPTED):
            return read_scripted, (scripted(obj),)
        if isinstance(obj, torch.nn.Module) and is_parametrized(obj):
            # torch refuses to pickle these, since their class is made at run time; cloudpickle can send such a class
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
        if isinstance(obj, functools._lru_cache_wrapper) and not _can_be_imported(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())  # it would be sent by its name
        if isinstance(obj, ModuleType) and obj.__name__ not in sys.modules:
            # such as `torch._C._functions`, made within another: by its name there, since it cannot be pickled by value
            owner, _, name = obj.__name__.rpartition(".")
            if getattr(sys.modules.get(owner), name, None) is obj:
                return getattr, (sys.modules[owner], name)
        return super().reducer_override(obj)


def _can_be_imported(function: Any) -> bool:
    """Tell whether a worker finds it by its name: not in a script or a notebook, nor within another function."""
    found: Any = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for step in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, step, None)
    return found is function


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type not in DEVICES:
        # each worker would hold its own copy there, and all the memory that the accelerator's library takes
        raise TypeError(f"a tensor is on {tensor.device}, and workers run on cpu: call .cpu() on it")


# Made by torch.jit, which has a form of its own for them and cannot pickle them.
SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


def scripted(obj: Any) -> bytes:
    """Return a module or function that torch.jit made, with its tensors, in its own form. Raise `TypeError` if it has
    none, or tensors on an accelerator."""
    for tensor in obj.state_dict().values() if isinstance(obj, torch.nn.Module) else ():
        _check_device(tensor)
    file = io.BytesIO()
    try:
        with _quiet():
            torch.jit.save(obj, file)
    except Exception as error:
        let_through(error)
        raise TypeError(
            f"a {type(obj).__name__} of torch.jit cannot be saved by torch.jit.save ({error}): use the module or "
            "function that it was made of, or parallelize=1"
        ) from error
    return file.getvalue()


def read_scripted(data: bytes) -> Any:
    """Return what `scripted` has written."""
    with _quiet():
        return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        yield


class Packer(_Pickler):
    """Pickles everything but tensors, which it lists, and `parameters`, which it names by their index. `any_kind`: also
    tensors that cannot be placed in shared memory are listed."""

    def __init__(self, file: io.BytesIO, parameters: Sequence[torch.Tensor] = (), any_kind: bool = False) -> None:
        super().__init__(file)
        self._any_kind = any_kind
        self._parameter_index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._tensor_index: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: object) -> tuple[str, int, bool, dict[str, object]] | None:
        """Return what stands for a tensor; None for anything that is pickled itself."""
        if not isinstance(obj, torch.Tensor):
            return None
        index = self._parameter_index.get(id(obj))
        if index is not None:
            return "parameter", index, obj.requires_grad, vars(obj)
        if not self._any_kind and not can_be_placed(obj):
            return None
        if id(obj) not in self._tensor_index:
            self._tensor_index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return "tensor", self._tensor_index[id(obj)], obj.requires_grad, vars(obj)


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._named = {"tensor": tensors, "parameter": parameters}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        kind, index, requires_grad, attributes = pid
        tensor: torch.Tensor = self._named[kind][index]
        if kind == "parameter":  # it may have been used before
            vars(tensor).clear()
            tensor.requires_grad_(requires_grad)
        vars(tensor).update(attributes)
        return tensor


def dumps(obj: object) -> bytes:
    """Pickle `obj` including its tensors: for small messages, which `pickle.loads` reads. Raise as `pack` does."""
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


def placed_stride(tensor: torch.Tensor, expanded: bool = False) -> tuple[int, ...]:
    """Return the strides for the tensor's own order of dimensions, without gaps: kernels, and so the bits, depend on
    it. If `expanded`, expanded dimensions keep the stride 0."""
    dense = torch.empty_like(tensor, device="meta")
    if not expanded or 0 not in tensor.stride():
        return dense.stride()
    along = [stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    small = torch.empty([1 if wide else size for wide, size in zip(along, tensor.shape, strict=True)], device="meta")
    return tuple(0 if wide else stride for wide, stride in zip(along, small.stride(), strict=True))


def pack(obj: object, parameters: Sequence[torch.Tensor] = (), expanded: bool = False) -> Packed:
    """Pickle `obj` without its tensors; those in `parameters` are only named by their index. `expanded`: expanded
    tensors stay so, for code that writes them; otherwise each element gets memory of its own.

    Raise `TypeError` for a tensor on an accelerator, and whatever else pickling `obj` raises.
    """
    file = io.BytesIO()
    packer = Packer(file, parameters)
    packer.dump(obj)
    placements, offset = [], 0
    for tensor in packer.tensors:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        stride = placed_stride(tensor, expanded)
        placement = Placement(offset, tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad, is_parameter)
        placements.append(placement)
        offset = aligned(offset + placement.numel * tensor.element_size())
    return Packed(file.getvalue(), tuple(packer.tensors), tuple(placements), offset)


def views(placements: Sequence[Placement], block: SharedBlock) -> list[torch.Tensor]:
    """Return the tensors in `block`, of their original kinds."""
    return [placement.dressed(placement.view(block)) for placement in placements]


def assemble(data: bytes, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor] = ()) -> Any:
    """Build the object that was passed to `pack` around these tensors and `parameters`."""
    return _Unpacker(data, tensors, parameters).load()


@contextmanager
def own_classes() -> Iterator[None]:
    """Let what is assembled in the body have definitions of its own of the classes that are sent by value. cloudpickle
    has one of each in a process, and would rebind its methods: those of other copies would work on this one."""
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID  # there is no public way
    before = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def unpack(
    data: bytes, placements: Sequence[Placement], block: SharedBlock | None, parameters: Sequence[torch.Tensor] = ()
) -> Any:
    """Build the object that was passed to `pack`, with its tensors as views of `block` (None: there are none)."""
    return assemble(data, [] if block is None else views(placements, block), parameters)


def taken_apart(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the object pickled without its tensors, and the tensors; `assemble` makes it again. Raise whatever
    pickling it raises."""
    file = io.BytesIO()
    packer = Packer(file, any_kind=True)
    packer.dump(obj)
    return file.getvalue(), packer.tensors


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
    return assemble(data, [_own(tensor) for tensor in tensors])
