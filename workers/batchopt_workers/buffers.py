"""The module's buffers during a step: every chunk starts from the same values, and what it changed is reported.

One process would run the batch through the module once and update its running statistics once. Here each chunk
starts from the buffers of the step's start, and its changes are summed along the chunk tree: those of floating-point
buffers weighted by the chunk's part of the batch, those of others (counters) as the first chunk left them.
"""

from __future__ import annotations

import torch

# Elements. A buffer over this is a constant (data kept with the module): all workers share one copy of it.
LARGEST_STATISTIC = 2**20


def statistics(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """The places, as `(owner, name)`, of the buffers that evaluation may change, each tensor once."""
    found, seen = [], set()
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or id(buffer) in seen or buffer.is_complex() or buffer.numel() > LARGEST_STATISTIC:
                continue
            seen.add(id(buffer))
            found.append((owner, name))
    return found


def _get(owner: torch.nn.Module, name: str) -> torch.Tensor:
    buffer = owner._buffers[name]
    if buffer is None:
        raise ValueError(f"the buffer {name!r} of {type(owner).__name__} became None during an evaluation")
    return buffer


class StepBuffers:
    """The buffers of a module, and their values at the step's start."""

    def __init__(self, module: torch.nn.Module, shared: bool = False) -> None:
        """`shared`: the buffers found in the module are those of the step's start, in memory that others read too;
        the module gets copies of its own to work on."""
        self._shared = shared
        self._places = statistics(module)
        self._start = [_get(owner, name) for owner, name in self._places]
        copies = [start.detach().clone() for start in self._start]
        if shared:
            self._own = copies
            own = {id(start): copy for start, copy in zip(self._start, copies, strict=True)}
            for owner in module.modules():
                owner._buffers.update({n: own.get(id(b), b) for n, b in owner._buffers.items()})
        else:
            self._own, self._start = self._start, copies
        self.size = sum(own.numel() for own in self._own)

    def begin_step(self) -> None:
        """Take the module's present buffers as the step's start; or the shared start as the module's buffers."""
        with torch.no_grad():
            for i, (owner, name) in enumerate(self._places):
                if self._shared:
                    owner._buffers[name] = self._own[i]
                    self._own[i].copy_(self._start[i])
                else:
                    self._own[i] = _get(owner, name)
                    self._start[i] = self._own[i].detach().clone()

    def restore(self) -> None:
        """Put the values of the step's start back.

        All of them: batch normalisation updates its statistics without a trace in their version counters.
        """
        with torch.no_grad():
            for (owner, name), own, start in zip(self._places, self._own, self._start, strict=True):
                owner._buffers[name] = own
                own.copy_(start)

    def changes(self, out: torch.Tensor, share: float, first: bool) -> None:
        """Write to `out` (shape `(size,)`, float64) what a chunk changed: times `share` (its part of the batch) for
        floating-point buffers, for others only if it is the `first` chunk."""
        out.zero_()
        parts = torch.split(out, [own.numel() for own in self._own])
        for (owner, name), start, part in zip(self._places, self._start, parts, strict=True):
            now = _get(owner, name).detach()
            if not torch.equal(now, start):  # the difference of equal infinities would be NaN
                weight = share if start.is_floating_point() else float(first)
                part.copy_((now.double() - start.double()).flatten() * weight)

    def take_over(self, changes: torch.Tensor) -> None:
        """Move the module's buffers from the step's start by the summed `changes`."""
        parts = torch.split(changes, [own.numel() for own in self._own])
        with torch.no_grad():
            for own, start, part in zip(self._own, self._start, parts, strict=True):
                if part.any():
                    value = start.double() + part.view(start.shape).to(start.device)
                    own.copy_(value if start.is_floating_point() else value.round())
