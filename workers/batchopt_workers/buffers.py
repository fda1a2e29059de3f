"""The module's buffers during a step: every chunk starts from the same values, and what it changed is reported.

One process would run the batch through the module once and update its running statistics once. Here each chunk starts
from the buffers of the step's start. At the step's end an element that no chunk changed stays as it was; another
becomes the mean of the chunks' values, weighted by samples, in floating-point buffers, and what the first chunk left
in others (counters, up to 2**53).
"""

from __future__ import annotations

import torch

# Elements. A buffer over this is a constant (data kept with the module): all workers share one copy of it.
LARGEST_STATISTIC = 2**20

Place = tuple[torch.nn.Module, str]


def statistics(module: torch.nn.Module) -> list[list[Place]]:
    """For each buffer that evaluation may change, the places `(owner, name)` where it is registered."""
    found: dict[int, list[Place]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and _may_change(buffer):
                found.setdefault(id(buffer), []).append((owner, name))
    return list(found.values())


def _may_change(buffer: torch.Tensor) -> bool:
    """Whether it can be a running statistic or a counter: small, real, and each element in memory of its own."""
    return (
        buffer.numel() <= LARGEST_STATISTIC
        and not buffer.is_complex()
        and buffer.layout is torch.strided
        and not any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    )


def _get(place: Place) -> torch.Tensor:
    owner, name = place
    buffer = owner._buffers[name]
    if buffer is None:
        raise ValueError(f"the buffer {name!r} of {type(owner).__name__} became None during an evaluation")
    return buffer


def _set(places: list[Place], buffer: torch.Tensor) -> None:
    for owner, name in places:
        owner._buffers[name] = buffer


class StepBuffers:
    """The buffers of a module, and their values at the step's start."""

    def __init__(self, module: torch.nn.Module, shared: bool = False) -> None:
        """`shared`: the buffers found in the module are those of the step's start, in memory that others read too;
        the module gets copies of its own to work on."""
        self._shared = shared
        self._places = statistics(module)
        found = [_get(places[0]) for places in self._places]
        copies = [buffer.detach().clone() for buffer in found]
        self._own, self._start = (copies, found) if shared else (found, copies)
        for places, own in zip(self._places, self._own, strict=True):
            _set(places, own)
        self._sizes = [own.numel() for own in self._own]
        self.size = 2 * sum(self._sizes)

    def begin_step(self) -> None:
        """Take the module's present buffers as the step's start; or the shared start as the module's buffers."""
        if not self._shared:
            self._own = [self._current(places, own) for places, own in zip(self._places, self._own, strict=True)]
            self._start = [own.detach().clone() for own in self._own]
        self.restore()

    def restore(self) -> None:
        """Put the values of the step's start back.

        All of them: batch normalisation updates its statistics without a trace in their version counters.
        """
        if not self._places:
            return
        with torch.no_grad():
            for places, own, start in zip(self._places, self._own, self._start, strict=True):
                _set(places, own)
                if own.grad_fn is not None:  # an update in place from something that requires grad
                    own.detach_()
                own.copy_(start)

    def changes(self, out: torch.Tensor, share: float, first: bool) -> None:
        """Write to `out` (shape `(size,)`, float64) what a chunk made of the buffers: first each element, times
        `share` (its part of the batch), or in buffers of integers as it is if this is the `first` chunk; then 1 where
        it differs from the start, else 0."""
        if not self.size:
            return
        out.zero_()
        values, flags = out.view(2, -1)
        parts = zip(torch.split(values, self._sizes), torch.split(flags, self._sizes), strict=True)
        for places, own, start, (value, flag) in zip(self._places, self._own, self._start, parts, strict=True):
            now = self._current(places, own).detach().flatten()
            if now.is_floating_point():
                value.copy_(now.double() * share)
            elif first:
                value.copy_(now)
            flag.copy_((now != start.flatten()) & ~(now.isnan() & start.flatten().isnan()))

    def _current(self, places: list[Place], own: torch.Tensor) -> torch.Tensor:
        """The buffer now, which the module may have replaced in one of its places."""
        for place in places:
            now = _get(place)
            if now is not own:
                if now.shape != own.shape or now.dtype != own.dtype:
                    raise ValueError(
                        f"the buffer {place[1]!r} of {type(place[0]).__name__} was {tuple(own.shape)} {own.dtype} and was "
                        f"replaced by {tuple(now.shape)} {now.dtype}: what chunks make of it cannot be averaged"
                    )
                return now
        return own

    def take_over(self, changes: torch.Tensor) -> None:
        """Move the module's buffers from the step's start to what the summed `changes` say."""
        if not self.size:
            return
        values, flags = changes.view(2, -1)
        parts = zip(torch.split(values, self._sizes), torch.split(flags, self._sizes), strict=True)
        with torch.no_grad():
            for own, start, (value, flag) in zip(self._own, self._start, parts, strict=True):
                if flag.any():
                    new = (value if own.is_floating_point() else value.round()).to(own.dtype).view(own.shape)
                    own.copy_(torch.where(flag.view(own.shape).to(own.device) > 0, new.to(own.device), start))
