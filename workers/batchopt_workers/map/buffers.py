"""The module's state during a step: every chunk starts from the same values, and its changes are reported.

A single process would run the batch through the module once and update its running statistics once. Here each chunk
starts from the values at the start of the step. At the end of the step, an element that no chunk changed keeps its
value; any other becomes, in floating-point tensors, the mean of the chunks' values weighted by samples, and in other
tensors (counters, up to 2**53) the value after the first chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# In elements. A larger tensor is a constant (data kept with the module): all workers share one copy, and a forward
# that writes it raises an error.
LARGEST_STATISTIC = 2**20


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written in place; 0 if that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a module: a buffer, a frozen parameter or an attribute."""

    owner: torch.nn.Module
    name: str

    def holder(self) -> dict[str, Any]:
        """Return the dict of the module that contains it."""
        for holder in (self.owner._buffers, self.owner._parameters):
            if self.name in holder:
                return holder
        return vars(self.owner)

    def get(self) -> torch.Tensor:
        """Return the tensor; raise `ValueError` if there is none."""
        tensor = self.now()
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self} became {type(tensor).__name__} during an evaluation")
        return tensor

    def now(self) -> object:
        """Return the current object."""
        holder = self.holder()
        return holder[self.name] if self.name in holder else None  # a part made by torch.jit holds them in no dict

    def set(self, tensor: object) -> None:
        """Replace the object."""
        self.holder()[self.name] = tensor

    def __str__(self) -> str:
        kind = "buffer" if self.name in self.owner._buffers else "parameter"
        kind = kind if self.holder() is not vars(self.owner) else "attribute"
        return f"the {kind} {self.name!r} of {type(self.owner).__name__}"


def statistics(module: torch.nn.Module, state: Collection[str] = ()) -> list[list[Place]]:
    """Return the places of each tensor that evaluation may change: small buffers of real numbers, and the tensors named
    in `state`."""
    found: dict[int, list[Place]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and _may_change(buffer):
                found.setdefault(id(buffer), []).append(Place(owner, name))
    if state:
        known = {(id(place.owner), place.name) for places in found.values() for place in places}
        for name, place in tensors_of(module):
            if name in state and (id(place.owner), place.name) not in known:
                found.setdefault(id(place.get()), []).append(place)
    return list(found.values())


def tensors_of(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, Place]]:
    """Yield the name and place of every tensor that a part of `module` has as a buffer, parameter or attribute; tied
    tensors once per place."""
    for path, owner in module.named_modules(prefix=prefix):
        for holder in (owner._buffers, owner._parameters, vars(owner)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}".lstrip("."), Place(owner, name)


def _may_change(buffer: torch.Tensor) -> bool:
    """Tell whether it can be a running statistic or a counter: small, real, and each element in memory of its own."""
    return (
        buffer.numel() <= LARGEST_STATISTIC
        and not buffer.is_complex()
        and buffer.layout is torch.strided
        and (0 not in buffer.stride() or compact(buffer).numel() == buffer.numel())
    )


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of its elements, each once, as real numbers: without the dimensions along which it is expanded."""
    if 0 not in tensor.stride() and not tensor.is_complex():
        return tensor
    tensor = tensor.detach()
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same kind, expanded in the same way."""
    small = compact(tensor).detach().clone()
    small = torch.view_as_complex(small) if tensor.is_complex() else small
    copy = small.expand(tensor.shape) if small.shape != tensor.shape else small
    return torch.nn.Parameter(copy, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else copy


def _set(places: list[Place], tensor: torch.Tensor) -> None:
    for place in places:
        place.set(tensor)


class StepBuffers:
    """A module's state (running statistics, counters) during a step, and its values at the start of the step."""

    def __init__(
        self,
        module: torch.nn.Module,
        shared: bool = False,
        state: Collection[str] = (),
        originals: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`state`: names of tensors that evaluation changes in addition to small buffers. `shared`: the module's
        tensors are the values at the start of the step, in memory that others read too; the module gets its own copies
        to work on, and its former ones are `replaced`. `originals`: start values to use instead of the module's
        tensors, by the identity of the latter."""
        self._module, self._shared, self.state = module, shared, frozenset(state)
        self._originals = originals or {}
        self._find()

    def _find(self) -> None:
        self.places = statistics(self._module, self.state)
        found = [places[0].get() for places in self.places]
        copies = [_copy(tensor) for tensor in found]
        starts = [self._originals.get(id(tensor), tensor) for tensor in found]
        self._own, self._start = (copies, starts) if self._shared else (found, copies)
        self.replaced = found if self._shared else []
        for places, own in zip(self.places, self._own, strict=True):
            _set(places, own)
        self._sizes = [compact(own).numel() for own in self._own]
        self.size = 2 * sum(self._sizes)
        self._hold()

    def _hold(self) -> None:
        pairs = zip(self.places, self._own, strict=True)
        held = [(place.holder(), place.name, own) for places, own in pairs for place in places]
        self._held = [(holder, name, own) for holder, name, own in held if isinstance(holder, dict)]
        self._note()

    def _note(self) -> None:
        self._versions: list[int] | None  # None while it is written here
        self._versions, self._is_written = [version_of(own) for own in self._own], False

    @property
    def is_written(self) -> bool:
        """Tell whether the module's state was written or replaced from outside since the step last set it."""
        return (
            bool(self.places)
            and self._versions is not None
            and (
                self._is_written
                or self._versions != [version_of(own) for own in self._own]
                or any(holder.get(name) is not own for holder, name, own in self._held)
            )
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the module works on."""
        return self._own

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the current elements."""
        return [compact(own).detach().clone() for own in self._own]

    def include(self, names: Collection[str]) -> None:
        """Let evaluation change these tensors too, starting from their current values. Raise `ValueError` if one is too
        large to be copied for each chunk."""
        for name, place in tensors_of(self._module):
            if name in names and (elements := compact(place.get()).numel()) > LARGEST_STATISTIC:
                raise ValueError(
                    f"forward writes '{name}', which has {elements} elements: what a forward writes is copied for each "
                    f"chunk, up to {LARGEST_STATISTIC} elements; write it between steps, in this process, or split it"
                )
        self.state |= set(names)
        self._find()

    def begin_step(self) -> None:
        """Take the module's current state as the start of the step; or, if shared, the start as its state."""
        if self._shared:
            self.restore()
        elif self.places or self.state or statistics(self._module):
            self._find()

    def restore(self) -> None:
        """Restore the values of the start of the step.

        All of them: batch normalisation updates its statistics without changing their version counters.
        """
        if not self.places:
            return
        self._versions = None
        with torch.no_grad():
            for places, own, start in zip(self.places, self._own, self._start, strict=True):
                _set(places, own)
                if own.grad_fn is not None:  # an update in place from something that requires grad
                    own.detach_()
                compact(own).copy_(compact(start))
        self._note()

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Set the module's state to that of the start of the step in the body, and back afterwards."""
        left, own = self.copies(), self._own
        there = [(place, place.now()) for places in self.places for place in places]
        self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(own, left, strict=True):
                    compact(tensor).copy_(value)
            for place, found in there:
                place.set(found)

    @contextmanager
    def as_now(self) -> Iterator[None]:
        """Start a step from the module's current state in the body; afterwards the previous step continues."""
        before = {tuple(places): i for i, places in enumerate(self.places)}
        sizes, own, start, was_written = self._sizes, self._own, self._start, self.is_written
        self._find()
        try:
            yield
        finally:
            for i, places in enumerate(self.places):
                k = before.get(tuple(places))
                if k is not None and sizes[k] == self._sizes[i]:
                    self._own[i], self._start[i] = own[k], start[k]
            self._hold()
            self._is_written = was_written

    def changes(self, out: torch.Tensor, share: float, first: bool) -> None:
        """Write what a chunk made of the state to `out` (shape `(size,)`, float64): first each element, times `share`
        (the chunk's part of the batch), or in integer tensors unscaled and only for the `first` chunk; then 1 where it
        differs from the start, else 0."""
        if not self.size:
            return
        out.zero_()
        values, flags = out.view(2, -1)
        parts = zip(torch.split(values, self._sizes), torch.split(flags, self._sizes), strict=True)
        for places, own, start, (value, flag) in zip(self.places, self._own, self._start, parts, strict=True):
            now, before = compact(self._current(places, own)).detach().flatten(), compact(start).flatten()
            if now.is_floating_point():
                value.copy_(now.double() * share)
            elif first:
                value.copy_(now)
            flag.copy_((now != before) & ~(now.isnan() & before.isnan()))

    def _current(self, places: list[Place], own: torch.Tensor) -> torch.Tensor:
        """Return the current tensor, which the module may have replaced in one of its places."""
        for place in places:
            now = place.get()
            if now is not own:
                if now.shape != own.shape or now.dtype != own.dtype or compact(now).shape != compact(own).shape:
                    raise ValueError(
                        f"{place} was {tuple(own.shape)} {own.dtype} and was replaced by {tuple(now.shape)} "
                        f"{now.dtype}: what chunks make of it cannot be averaged"
                    )
                return now
        return own

    def take_over(self, changes: torch.Tensor) -> None:
        """Move the module's state from the start of the step to the summed `changes`; unchanged elements are kept."""
        if not self.size:
            return
        self._versions = None
        values, flags = changes.view(2, -1)
        parts = zip(torch.split(values, self._sizes), torch.split(flags, self._sizes), strict=True)
        with torch.no_grad():
            for own, (value, flag) in zip(self._own, parts, strict=True):
                if flag.any():
                    here = compact(own)
                    new = (value if here.is_floating_point() else value.round()).to(here.dtype).view(here.shape)
                    changed = flag.view(here.shape).to(here.device) > 0
                    here.copy_(torch.where(changed, new.to(here.device), here))
        self._note()
