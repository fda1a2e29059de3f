"""Flattening: a module's trainable parameters become views of one vector X.

X is memory of this process alone, and becomes memory that others can map, at the same address, as long as there are
workers.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from batchopt.errors import TRAINER_ADVICE, BatchoptError
from batchopt_workers.watch.record import tensors_of
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.memory import SharedBlock

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class Registration(NamedTuple):
    """The place of a parameter of X in a module: `owner._parameters[key]`; `name` is its name in the whole module."""

    owner: torch.nn.Module
    key: str
    name: str
    parameter: torch.nn.Parameter


def registrations(module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[Registration]:
    """Return all places of `parameters`; each place of tied ones."""
    ours = {id(parameter) for parameter in parameters}
    return [
        Registration(owner, key, f"{prefix}.{key}" if prefix else key, parameter)
        for prefix, owner in module.named_modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None and id(parameter) in ours
    ]


def replaced(name: str) -> BatchoptError:
    """Return the error for a parameter that is another object than before."""
    return BatchoptError(
        f"parameter '{name}' was replaced, or taken out (module.{name} = ..., load_state_dict(assign=True), "
        "module.to(device)), since this BatchOptimizer was built: keep the Parameter and give it values (p.copy_ under "
        "torch.no_grad(), p.data = ..., load_state_dict without assign), or build a new BatchOptimizer"
    )


def moved() -> BatchoptError:
    """Return the error for X that was given other memory itself."""
    return BatchoptError(
        "`parameters` was given other memory (share_memory_, set_, or sent to another process): it is memory that "
        "workers read; send a clone of it, and build a new BatchOptimizer"
    )


def check_trained(module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> None:
    """Raise `BatchoptError` if `module` trains others than these `parameters`."""
    ours = set(map(id, parameters))
    for owner in module.modules():  # without names, which are slow to build
        for parameter in owner._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in ours:
                name = next(name for name, other in module.named_parameters() if other is parameter)
                raise BatchoptError(
                    f"parameter '{name}' was frozen, or another, when this BatchOptimizer was built: build a new one"
                )


class Flat:
    """X and its layout. The module's parameters are views of `vector`; `block` is its memory, which workers map (None
    for a module on an accelerator)."""

    def __init__(self, layout: Layout, vector: torch.Tensor, block: SharedBlock | None) -> None:
        self.layout = layout
        self.vector = vector
        self.block = block
        self.base = vector.data_ptr()  # where it has to stay
        step = vector.element_size()
        self._forms = [
            (self.base + slot.offset * step if slot.numel else 0, slot.shape, slot.dtype(layout.dtype))
            for slot in layout.slots
        ]
        # the storages given to parameters, each of one parameter alone; weak, to detect other references
        self._given: dict[int, StorageWeakRef] = {}
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def share(self, user: object) -> None:
        """Make X memory that workers can map as long as `user` exists, or until it releases X. Raise `MemoryError` and
        `OSError`."""
        self._users.add(user)
        if self.block is not None:
            self.block.make_shared()

    def release(self, user: object) -> None:
        """Note that `user` has no workers any more. Without users, X becomes memory of this process alone."""
        self._users.discard(user)
        if self.block is not None and not self._users:
            self.block.make_private()

    def bind(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make those of `parameters` that are not views of X such views again, whatever they hold, wherever X is."""
        is_moved = self.vector.data_ptr() != self.base
        if rebound := [*range(len(parameters))] if is_moved else self.rebound(parameters):
            self._bind(parameters, rebound, self.layout.views(self.vector))

    def _bind(self, parameters: list[torch.nn.Parameter], which: list[int], views: list[torch.Tensor]) -> None:
        for i in which:
            parameters[i].data = views[i]
            if self.block is not None:
                self._given[i] = StorageWeakRef(views[i].untyped_storage())  # type: ignore[no-untyped-call]

    def rebound(self, parameters: list[torch.nn.Parameter]) -> list[int]:
        """Return the indices of those that are no longer the views of X; in less than a microsecond each."""
        found = []
        for i, (p, (address, shape, dtype)) in enumerate(zip(parameters, self._forms, strict=True)):
            if (
                p.data_ptr() != address
                or p.dtype is not dtype
                or p.shape != shape
                or not p.is_contiguous()
                or (dtype.is_complex and p.is_conj())
            ):
                found.append(i)  # a comprehension takes one more call
        return found

    def holds(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Tell whether each of `parameters` still is its view of X."""
        return self.vector.data_ptr() == self.base and not self.rebound(parameters)

    def take_over(self, module: torch.nn.Module, parameters: list[torch.nn.Parameter], rebound: list[int]) -> None:
        """Copy into X the values of those parameters that were given other memory (p.data = ...), and make them views
        of X again.

        Raise `BatchoptError` for one of another shape, dtype or device, over memory of another tensor of `module`, or
        whose place in X is still viewed by an older tensor; X and the values of parameters are unchanged then.
        """
        slots, device = self.layout.slots, self.vector.device
        for i in rebound:
            was = *self._forms[i][1:], device
            now = tuple(parameters[i].shape), parameters[i].dtype, parameters[i].device
            if was != now:
                raise BatchoptError(
                    f"parameter '{slots[i].name}' was {_form(*was)} when this BatchOptimizer was built, and is now "
                    f"{_form(*now)}: give it values of that kind (p.data = ..., p.copy_ under torch.no_grad()), or "
                    "build a new BatchOptimizer"
                )
        try:
            _check_memory([(slot.name, p) for slot, p in zip(slots, parameters, strict=True)], module)
        except ValueError as error:
            raise BatchoptError(f"parameters were given other memory, and {error}") from None
        for i in rebound:  # they may have been swapped with each other
            parameters[i].data = parameters[i].data.clone()
        for i in rebound:
            if self._is_viewed(i):
                raise BatchoptError(
                    f"parameter '{slots[i].name}' was given other memory (p.data = ...), and another tensor still "
                    "views that which it had, which is a part of X and would change: keep a clone instead "
                    "(p.data.clone(), copy.deepcopy(module.state_dict())), or delete it first; p.copy_ under "
                    "torch.no_grad() needs neither"
                )
        views = self.layout.views(self.vector)
        for i in rebound:
            views[i].copy_(parameters[i].data)
        self._bind(parameters, rebound, views)

    def _is_viewed(self, i: int) -> bool:
        """Tell whether the earlier storage of parameter `i` still is a part of X and used by tensors."""
        given = self._given.get(i)
        if given is None:
            return False
        for collected in (False, True):
            storage = torch.UntypedStorage._new_with_weak_ptr(given.cdata)
            if storage is None or storage.data_ptr() != self._forms[i][0]:
                return False
            del storage
            if not collected:
                gc.collect()  # perhaps only garbage refers to it
        return True


def _form(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{shape} {dtype} on {device}"


_living: weakref.WeakValueDictionary[int, Flat] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):  # a fork has its own copy of the parameters, which its workers could not map
    os.register_at_fork(after_in_child=_living.clear)


def trainable(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the named parameters of X, each once: complex ones first.

    Raise `TypeError` or `ValueError` for a module that cannot be flattened: not initialised, nothing to train, several
    dtypes or devices, parameters that share memory, hooks on parameters.
    """
    if isinstance(module, type):
        raise TypeError(
            f"`module` must be a torch.nn.Module instance; got the class {module.__name__} - did you mean "
            f"{module.__name__}()?"
        )
    if not isinstance(module, torch.nn.Module):
        instead = f": {TRAINER_ADVICE}" if isinstance(module, (Iterator, list)) else ""  # of parameters
        raise TypeError(f"`module` must be a torch.nn.Module instance; got {type(module).__name__}{instead}")
    everything = list(module.named_parameters())
    for kind, found in (("parameter", everything), ("buffer", module.named_buffers())):
        for name, tensor in found:
            if is_lazy(tensor):
                raise ValueError(f"{kind} '{name}' is uninitialised (a lazy module): run one forward pass first")
    named = [(name, p) for name, p in everything if p.requires_grad]
    if not named:
        raise ValueError(f"`module` has no parameter with requires_grad=True ({len(everything)} frozen)")
    _check_kind(named)
    check_hooks(named)
    _check_memory(named, module)
    return sorted(named, key=lambda pair: not pair[1].is_complex())


def _check_kind(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    for name, parameter in named:
        if parameter.layout is not torch.strided:
            raise ValueError(f"parameter '{name}' is sparse ({parameter.layout}): X is dense; make it p.to_dense()")
    devices = Counter(str(p.device) for _, p in named)
    if len(devices) > 1:
        raise ValueError(f"trainable parameters are on {len(devices)} devices {dict(devices)}: move the module to one")
    if named[0][1].is_meta:
        raise ValueError(
            "parameters are on the meta device: give them memory with module.to_empty(device='cpu') and initialise them"
        )
    for name, parameter in named:
        if type(parameter) is not torch.nn.Parameter:
            raise TypeError(
                f"parameter '{name}' is a {type(parameter).__name__}, a subclass of torch.nn.Parameter: X "
                "stores plain values, so the subclass would be lost in workers; store a plain Parameter "
                "(torch.nn.Parameter(p.detach().as_subclass(torch.Tensor))) and convert it in forward"
            )
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for _, p in named)
    if len({p.dtype.to_real() for _, p in named}) > 1:
        rarest = dtypes.most_common()[-1][0]
        example = next(name for name, p in named if str(p.dtype) == f"torch.{rarest}")
        if any(p.is_complex() for _, p in named):
            example = next(name for name, p in named if p.is_complex())
            raise ValueError(
                f"trainable parameters have dtypes {dict(dtypes)} ('{example}' is complex): beside complex64 there may "
                "be float32, beside complex128 float64; cast the real ones with module.float() or module.double(), "
                "complex ones with p.data = p.data.to(dtype)"
            )
        raise ValueError(
            f"trainable parameters have dtypes {dict(dtypes)} ('{example}' is {rarest}): cast the module with "
            "module.to(dtype)"
        )
    for name, parameter in named:
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"parameter '{name}' is {parameter.dtype}; trainable ones must be float64, float32, bfloat16, float16, "
                "complex128 or complex64: p.data = p.data.to(dtype)"
            )


def check_hooks(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise `ValueError` for a parameter with a hook; in a tenth of a microsecond each."""
    for name, parameter in named:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter '{name}' has a hook; hooks on tensors do not travel to workers, and would see the "
                "gradient of a chunk: register it on worker.module in a prehook and remove it in the posthook, or hook "
                "the module that owns the parameter"
            )


def _check_memory(named: list[tuple[str, torch.nn.Parameter]], module: torch.nn.Module) -> None:
    trained = {id(p) for _, p in named}
    held = ((path, tensor) for path, owner, name, tensor in tensors_of(module) if not _is_computed(owner, name))
    others = [*module.named_parameters(), *held]
    extents = []
    for name, tensor in [*named, *((n, t) for n, t in others if id(t) not in trained)]:
        if tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        if id(tensor) in trained and _overlaps_itself(tensor):
            raise ValueError(f"parameter '{name}' is expanded: its elements share memory; make it contiguous")
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        extents.append((start, start + (last + 1) * tensor.element_size(), name, id(tensor) in trained))
    extents.sort()
    # the tensor that reaches furthest so far, among untrained and among trained ones
    furthest: dict[bool, tuple[int, str]] = {}
    for start, end, name, is_trained in extents:
        for kind, (reach, other) in furthest.items():
            if start < reach and (is_trained or kind):
                raise ValueError(
                    f"'{other}' and '{name}' are different tensors over one storage: to tie two parameters, assign "
                    "the same Parameter to both modules; else clone one of them"
                )
        furthest[is_trained] = max(furthest.get(is_trained, (0, "")), (end, name))


def _is_computed(owner: torch.nn.Module, name: str) -> bool:
    """Tell whether a hook of the module replaces this attribute before each forward, as that of
    `torch.nn.utils.spectral_norm`: until the first forward it is the parameter's own memory."""
    hooks = owner._forward_pre_hooks.values()
    return name in vars(owner) and any(getattr(hook, "name", None) == name for hook in hooks)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements may share memory: a dimension's stride does not step over the smaller ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _start(parameters: list[torch.nn.Parameter]) -> int:
    """Return the address of the first element."""
    return next((parameter.data_ptr() for parameter in parameters if parameter.numel()), 0)


def flatten(module: torch.nn.Module) -> tuple[Flat, list[torch.nn.Parameter]]:
    """Make the trainable parameters of `module` views of one vector, keeping their values.

    Tied parameters count once. A module that was flattened before, with the same shapes, keeps its vector: two
    optimizers over one module share X. Raise what `trainable` raises, before the module is changed.
    """
    named = trainable(module)
    parameters = [parameter for _, parameter in named]
    layout, device = Layout.of(named, parameters[0].dtype), parameters[0].device
    dtype = layout.dtype
    before = _living.get(_start(parameters))
    if before is not None and before.layout == layout and before.holds(parameters):
        return before, parameters
    block = None
    if device.type == "cpu":
        block = SharedBlock(-1, nbytes=layout.size * dtype.itemsize)
        vector = block.tensor(dtype, (layout.size,))
    else:
        vector = torch.empty(layout.size, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter, view in zip(parameters, layout.views(vector), strict=True):
            view.copy_(parameter)
    flat = Flat(layout, vector, block)
    flat.bind(parameters)
    _living[_start(parameters)] = flat
    return flat, parameters
