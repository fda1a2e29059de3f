"""The tensors of a program beside X: the module's state, which chunks may change, and constants, which none may.

What must hold, however a batch is cut: each chunk starts from the values at the start of the step. A single process
would run the batch through the module once, and update its running statistics once. So, at the end of the step, an
element of the state that no chunk changed keeps its value; any other becomes, in floating-point tensors, the mean of
the chunks' values weighted by samples, and in other tensors (counters, up to 2**53) the value after the first chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from batchopt_workers.data.places import LARGEST_STATISTIC, Place, compact, tensors_of, version_of
from batchopt_workers.map.constants import Constants


def places_of_state(module: torch.nn.Module, state: Collection[str] = ()) -> list[list[Place]]:
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


def _may_change(buffer: torch.Tensor) -> bool:
    """Tell whether it can be a running statistic or a counter: small, real, and each element in memory of its own."""
    return (
        buffer.numel() <= LARGEST_STATISTIC
        and not buffer.is_complex()
        and buffer.layout is torch.strided
        and (0 not in buffer.stride() or compact(buffer).numel() == buffer.numel())
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same kind, expanded in the same way."""
    small = compact(tensor).detach().clone()
    small = torch.view_as_complex(small) if tensor.is_complex() else small
    copy = small.expand(tensor.shape) if small.shape != tensor.shape else small
    return torch.nn.Parameter(copy, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else copy


class Statistic(NamedTuple):
    """A tensor of the state: all its places, the tensor there that the module works on, its values at the start of the
    step, and their number."""

    places: tuple[Place, ...]
    own: torch.Tensor
    start: torch.Tensor
    size: int

    def put_in_place(self) -> None:
        """Make it the module's again."""
        for place in self.places:
            place.set(self.own)

    def has_form_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether it has the same dtype and shape, also in memory."""
        own = self.own
        same = tensor.shape == own.shape and tensor.dtype == own.dtype
        return same and compact(tensor).shape == compact(own).shape

    def now(self) -> torch.Tensor:
        """Return the current tensor, which the module may have replaced in one of its places. Raise `ValueError` if it
        has another form."""
        own = self.own
        for place in self.places:
            now = place.get()
            if now is not own:
                if not self.has_form_of(now):
                    raise ValueError(
                        f"{place} was {tuple(own.shape)} {own.dtype} and was replaced by {tuple(now.shape)} "
                        f"{now.dtype}: what chunks make of it cannot be averaged"
                    )
                return now
        return own


class ModuleState:
    """A module's `statistics` (running statistics, counters) during a step, and its `constants`."""

    def __init__(
        self,
        module: torch.nn.Module,
        shared: bool = False,
        state: Collection[str] = (),
        originals: Mapping[int, torch.Tensor] | None = None,
        discard: Callable[[], object] | None = None,
    ) -> None:
        """`state`: names of tensors that evaluation changes in addition to small buffers. `shared`: the module's
        tensors are the values at the start of the step, in memory that others read too; the module gets its own copies
        to work on. `originals`: start values to use instead of the module's tensors, by the identity of the latter;
        with `discard`, which restores them all, also those of constants."""
        self._module, self._shared, self.state = module, shared, frozenset(state)
        self._originals, self._discard = originals or {}, discard
        self.constants: Constants  # from the first call of `watch` on
        self.resets = 0  # how often `at_start` has set it back: workers that share its memory take it again
        self._find()

    def _find(self) -> None:
        found: list[Statistic] = []
        variable: list[torch.Tensor] = []  # the module's own and those that they have replaced
        for places in places_of_state(self._module, self.state):
            tensor = places[0].get()
            copy, start = _copy(tensor), self._originals.get(id(tensor), tensor)
            own, start = (copy, start) if self._shared else (tensor, copy)
            statistic = Statistic(tuple(places), own, start, compact(own).numel())
            statistic.put_in_place()
            found.append(statistic)
            variable += [tensor, statistic.own]
        size = 2 * sum(statistic.size for statistic in found)
        # in one line, between whose parts no interrupt comes
        self.statistics, self._variable, self.size = found, variable, size
        self._hold()

    def watch(self, others: Iterable[tuple[str, torch.Tensor]], parameters: Iterable[torch.Tensor]) -> None:
        """Take all tensors of the module for constants, and `others` by name, but state and the `parameters` of X."""
        twins = {} if self._discard is None else self._originals
        self.constants = Constants(self._module, others, (*parameters, *self._variable), twins, self._discard)

    def _hold(self) -> None:
        held = [(place.holder(), place.name, own) for places, own, *_ in self.statistics for place in places]
        self._held = [(holder, name, own) for holder, name, own in held if isinstance(holder, dict)]
        self._note()

    def _note(self) -> None:
        self._versions: list[int] | None = [version_of(own) for own in self.tensors]  # None while it is written here

    @property
    def is_written(self) -> bool:
        """Tell whether the module's state was written or replaced from outside since the step last set it."""
        if not self.statistics or self._versions is None:
            return False
        versions = [version_of(own) for own in self.tensors]
        return versions != self._versions or any(holder.get(name) is not own for holder, name, own in self._held)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the state that the module works on."""
        return [statistic.own for statistic in self.statistics]

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the current elements."""
        return [compact(own).detach().clone() for own in self.tensors]

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
        elif self.statistics or self.state or places_of_state(self._module):
            self._find()

    def restore(self) -> None:
        """Restore the values of the start of the step.

        All of them: batch normalisation updates its statistics without changing their version counters.
        """
        if not self.statistics:
            return
        self._versions = None
        with torch.no_grad():
            for statistic in self.statistics:
                statistic.put_in_place()
                if statistic.own.grad_fn is not None:  # an update in place from something that requires grad
                    statistic.own.detach_()
                compact(statistic.own).copy_(compact(statistic.start))
        self._note()

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Set the module's state to that of the start of the step in the body, and back afterwards."""
        left = [*zip(self.tensors, self.copies(), strict=True)]
        there = [(place, place.now()) for statistic in self.statistics for place in statistic.places]
        self.restore()
        self.resets += 1
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in left:
                    compact(tensor).copy_(value)
            for place, found in there:
                place.set(found)

    @contextmanager
    def as_now(self) -> Iterator[None]:
        """Start a step from the module's current state in the body; afterwards the previous step continues."""
        before, was_written = {found.places: found for found in self.statistics}, self.is_written
        self._find()
        try:
            yield
        finally:
            self.statistics = [
                earlier if (earlier := before.get(now.places)) is not None and earlier.has_form_of(now.own) else now
                for now in self.statistics
            ]
            self._hold()
            if was_written:
                self._versions = []

    def _parts(self, numbers: torch.Tensor) -> Iterator[tuple[Statistic, torch.Tensor, torch.Tensor]]:
        values, flags = numbers.view(2, -1)
        sizes = [statistic.size for statistic in self.statistics]
        return zip(self.statistics, values.split(sizes), flags.split(sizes), strict=True)

    def changes(self, out: torch.Tensor, share: float, first: bool) -> None:
        """Write what a chunk made of the state to `out` (shape `(size,)`, float64): first each element, times `share`
        (the chunk's part of the batch), or in integer tensors unscaled and only for the `first` chunk; then 1 where it
        differs from the start, else 0."""
        if not self.size:
            return
        out.zero_()
        for statistic, value, flag in self._parts(out):
            now, before = compact(statistic.now()).detach().flatten(), compact(statistic.start).flatten()
            if now.is_floating_point():
                value.copy_(now.double() * share)
            elif first:
                value.copy_(now)
            flag.copy_((now != before) & ~(now.isnan() & before.isnan()))

    def take_over(self, changes: torch.Tensor) -> None:
        """Move the module's state from the start of the step to the summed `changes`; unchanged elements are kept."""
        if not self.size:
            return
        self._versions = None
        with torch.no_grad():
            for statistic, value, flag in self._parts(changes):
                if flag.any():
                    here = compact(statistic.own)
                    new = (value if here.is_floating_point() else value.round()).to(here.dtype).view(here.shape)
                    changed = flag.view(here.shape).to(here.device) > 0
                    here.copy_(torch.where(changed, new.to(here.device), here))
        self._note()
