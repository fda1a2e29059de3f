"""The module's state during a step: every chunk starts from the same values, and what it changed is reported.

One process would run the batch through the module once and update its running statistics once. Here each chunk starts
from the values of the step's start. At the step's end an element that no chunk changed stays as it was; another
becomes the mean of the chunks' values, weighted by samples, in floating-point tensors, and what the first chunk left
in others (counters, up to 2**53).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Elements. What is larger is a constant (data kept with the module): all workers share one copy of it, and a forward
# that writes it is refused.
LARGEST_STATISTIC = 2**20


def version_of(tensor: torch.Tensor) -> int:
    """The number of times that it was written in place; 0 where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Place:
    """Where a module has a tensor: as a buffer, a frozen parameter or an attribute."""

    owner: torch.nn.Module
    name: str

    def holder(self) -> dict[str, Any]:
        """The dict of the module that has it."""
        for holder in (self.owner._buffers, self.owner._parameters):
            if self.name in holder:
                return holder
        return vars(self.owner)

    def get(self) -> torch.Tensor:
        """Raises `ValueError` where there is none."""
        tensor = self.now()
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self} became {type(tensor).__name__} during an evaluation")
        return tensor

    def now(self) -> object:
        """The object that is there now."""
        holder = self.holder()
        return holder[self.name] if self.name in holder else None  # a part made by torch.jit holds them in no dict

    def set(self, tensor: object) -> None:
        """Put another one there."""
        self.holder()[self.name] = tensor

    def __str__(self) -> str:
        kind = "buffer" if self.name in self.owner._buffers else "parameter"
        kind = kind if self.holder() is not vars(self.owner) else "attribute"
        return f"the {kind} {self.name!r} of {type(self.owner).__name__}"


def statistics(module: torch.nn.Module, state: Collection[str] = ()) -> list[list[Place]]:
    """For each tensor that evaluation may change, the places where it is: small buffers of real numbers, and what
    `state` names."""
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
    """Every tensor that a part of `module` has as a buffer, as a parameter or as an attribute, by its name; tied ones
    in each place."""
    for path, owner in module.named_modules(prefix=prefix):
        for holder in (owner._buffers, owner._parameters, vars(owner)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}".lstrip("."), Place(owner, name)


def _may_change(buffer: torch.Tensor) -> bool:
    """Whether it can be a running statistic or a counter: small, real, and each element in memory of its own."""
    return (
        buffer.numel() <= LARGEST_STATISTIC
        and not buffer.is_complex()
        and buffer.layout is torch.strided
        and (0 not in buffer.stride() or compact(buffer).numel() == buffer.numel())
    )


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, each once, as a view of real numbers: without the dimensions along which it is expanded."""
    if 0 not in tensor.stride() and not tensor.is_complex():
        return tensor
    tensor = tensor.detach()
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same kind, expanded as it is."""
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
        """`state`: names of what evaluation changes beside small buffers. `shared`: the tensors found in the module are
        those of the step's start, in memory that others read too; the module gets copies of its own to work on. Instead
        of those found there, `originals` has those to start from, by the identity of the one found."""
        self._module, self._shared, self.state = module, shared, frozenset(state)
        self._originals = originals or {}
        self._find()

    def _find(self) -> None:
        self.places = statistics(self._module, self.state)
        found = [places[0].get() for places in self.places]
        copies = [_copy(tensor) for tensor in found]
        starts = [self._originals.get(id(tensor), tensor) for tensor in found]
        self._own, self._start = (copies, starts) if self._shared else (found, copies)
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
        self._versions: list[int] | None  # None: it is being written here
        self._versions, self._is_written = [version_of(own) for own in self._own], False

    @property
    def is_written(self) -> bool:
        """Whether somebody else has written the module's state, or put other tensors there, since it was last as the
        step has it."""
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
        """Those that the module works on."""
        return self._own

    def include(self, names: Collection[str]) -> None:
        """From now on evaluation may change these, too: they are as at the step's start now. Raises `ValueError` for
        one that is too large to be copied for each chunk."""
        for name, place in tensors_of(self._module):
            if name in names and (elements := compact(place.get()).numel()) > LARGEST_STATISTIC:
                raise ValueError(
                    f"forward writes '{name}', which has {elements} elements: what a forward writes is copied for each "
                    f"chunk, up to {LARGEST_STATISTIC} elements; write it between steps, in this process, or split it"
                )
        self.state |= set(names)
        self._find()

    def begin_step(self) -> None:
        """Take the module's present state as the step's start; or the shared start as the module's state."""
        if self._shared:
            self.restore()
        elif self.places or self.state or statistics(self._module):
            self._find()

    def restore(self) -> None:
        """Put the values of the step's start back.

        All of them: batch normalisation updates its statistics without a trace in their version counters.
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
        """For the body, the module's state is that of the step's start; afterwards it is what it was before."""
        left = [compact(own).detach().clone() for own in self._own]
        own = self._own
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
        """For the body, a step starts from the module's present state; afterwards it is the step of before that goes
        on."""
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
        """Write to `out` (shape `(size,)`, float64) what a chunk made of the state: first each element, times
        `share` (its part of the batch), or in tensors of integers as it is if this is the `first` chunk; then 1 where
        it differs from the start, else 0."""
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
        """The tensor now, which the module may have replaced in one of its places."""
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
        """Move the module's state from the step's start to what the summed `changes` say, and leave the rest."""
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
