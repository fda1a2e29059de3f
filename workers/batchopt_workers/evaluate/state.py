"""The module's state: small buffers, which chunks may change.

What must hold, however a batch is cut: each chunk starts from the values at the start of the step. A single process
would run the batch through the module once, and update its running statistics once. So, at the end of the step, an
element of the state that no chunk changed keeps its value; any other becomes, in floating-point tensors, the mean of
the chunks' values weighted by samples, and in other tensors (counters, up to 2**53) the value after the first chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from batchopt_workers.watch.record import LARGEST_STATISTIC, compact

# A part of a module, and the name of its buffer.
Place = tuple[torch.nn.Module, str]

_version = attrgetter("_version")


def places_of_state(module: torch.nn.Module) -> list[tuple[torch.Tensor, list[Place]]]:
    """Return each tensor that evaluation may change, a small buffer, with its places."""
    found: dict[int, tuple[torch.Tensor, list[Place]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and _may_change(buffer):
                found.setdefault(id(buffer), (buffer, []))[1].append((owner, name))
    return list(found.values())


def _may_change(buffer: torch.Tensor) -> bool:
    """Tell whether it can be a running statistic or a counter: it is small, and has elements that can be written."""
    is_small = buffer.numel() <= LARGEST_STATISTIC
    return is_small and buffer.layout is torch.strided and not (buffer.is_quantized or buffer.is_meta)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same kind, expanded in the same way."""
    small = compact(tensor).detach().clone()
    small = torch.view_as_complex(small) if tensor.is_complex() else small
    return small.expand(tensor.shape) if small.shape != tensor.shape else small


class Statistic(NamedTuple):
    """A tensor of the state: its places, the tensor there that the module works on, and its values at the start of the
    step. `is_plain`: it is neither complex nor expanded, so it is its own `compact` form."""

    places: Sequence[Place]
    own: torch.Tensor
    start: torch.Tensor
    is_plain: bool

    def now(self) -> torch.Tensor:
        """Return the elements of the current tensor, which the module may have replaced in one of its places. Raise
        `ValueError` if it has another form, or there is none."""
        own = self.own
        for owner, name in self.places:
            now = owner._buffers[name]
            if now is own:
                continue
            where = f"the buffer {name!r} of {type(owner).__name__}"
            if now is None:
                raise ValueError(f"{where} became None during an evaluation")
            if now.shape != own.shape or now.dtype != own.dtype or compact(now).shape != compact(own).shape:
                raise ValueError(
                    f"{where} was {tuple(own.shape)} {own.dtype} and was replaced by {tuple(now.shape)} {now.dtype}: "
                    "what chunks make of it cannot be averaged"
                )
            own = now
            break
        return (own if self.is_plain else compact(own)).detach()


class ModuleState:
    """A module's `statistics` (running statistics, counters) during a step."""

    def __init__(
        self, module: torch.nn.Module, shared: bool = False, originals: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """`shared`: the module's tensors are the values at the start of the step, in memory that others read too; the
        module gets its own copies to work on. `originals`: start values to use instead of the module's tensors, by the
        identity of the latter."""
        self._module, self._shared, self._originals = module, shared, originals or {}
        self.starts = 0  # how often it has begun a step: workers that share its memory take it again
        self._before: list[torch.Tensor] = []  # the start of the step, if that has ended
        self._find()

    def _find(self) -> None:
        found: list[Statistic] = []
        for tensor, places in places_of_state(self._module):
            copy, start = _copy(tensor), self._originals.get(id(tensor), tensor)
            own, start = (copy, start) if self._shared else (tensor, copy)
            found.append(Statistic(places, own, start, compact(own) is own))
            for owner, name in places:
                owner._buffers[name] = own
        self._sizes = [compact(statistic.own).numel() for statistic in found]
        self.statistics, self.size = found, 2 * sum(self._sizes)  # in one line, between whose parts no interrupt comes
        self._before = []
        self._note()

    def _note(self) -> None:
        counted = [own for _, own, *_ in self.statistics if not own.is_inference()]
        self._versions: list[int] | None = [*map(_version, counted)]  # None while it is written here

    @property
    def is_written(self) -> bool:
        """Tell whether the module's state was written or replaced from outside since the step last set it."""
        if not self.statistics or self._versions is None:
            return False
        versions = [own._version for _, own, *_ in self.statistics if not own.is_inference()]
        if versions != self._versions:
            return True
        for places, own, *_ in self.statistics:
            for owner, name in places:
                if name in owner._buffers and owner._buffers[name] is not own:
                    return True
        return False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the state that the module works on."""
        return [statistic.own for statistic in self.statistics]

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the current elements."""
        return [compact(own).detach().clone() for _, own, *_ in self.statistics]

    def begin_step(self) -> None:
        """Take the module's current state as the start of the step; or, if shared, the start as its state."""
        self.starts += 1
        if self._shared:
            self.restore()
        elif self.statistics or places_of_state(self._module):
            self._find()

    def restore(self) -> None:
        """Restore the values of the start of the step.

        All of them: batch normalisation updates its statistics without changing their version counters.
        """
        if not self.statistics:
            return
        self._versions = None
        with torch.no_grad():
            for places, own, start, is_plain in self.statistics:
                for owner, name in places:
                    owner._buffers[name] = own
                if own.grad_fn is not None:  # an update in place from something that requires grad
                    own.detach_()
                (own if is_plain else compact(own)).copy_(start if is_plain else compact(start))
        self._note()

    def _parts(self, numbers: torch.Tensor) -> Iterator[tuple[Statistic, torch.Tensor, torch.Tensor]]:
        values, flags = numbers.view(2, -1)
        return zip(self.statistics, values.split(self._sizes), flags.split(self._sizes), strict=True)

    def changes(self, out: torch.Tensor, share: float, first: bool) -> None:
        """Write what a chunk made of the state to `out` (shape `(size,)`, float64): first each element, times `share`
        (the chunk's part of the batch), or in integer tensors unscaled and only for the `first` chunk; then 1 where it
        differs from the start, else 0."""
        if not self.size:
            return
        out.zero_()
        for statistic, value, flag in self._parts(out):
            start, now = statistic.start, statistic.now().flatten()
            before = (start if statistic.is_plain else compact(start)).flatten()
            if now.is_floating_point():
                value.copy_(now.double() * share)
            elif first:
                value.copy_(now)
            flag.copy_((now != before) & ~(now.isnan() & before.isnan()))

    def take_over(self, changes: torch.Tensor) -> None:
        """Move the module's state from the start of the step to the summed `changes`, from which the next evaluation
        starts; unchanged elements are kept."""
        if not self.size:
            return
        self._versions = None
        before = [compact(start).clone() for _, _, start, _ in self.statistics]
        with torch.no_grad():
            for statistic, value, flag in self._parts(changes):
                if flag.any():
                    here = compact(statistic.own)
                    new = (value if here.is_floating_point() else value.round()).to(here.dtype).view(here.shape)
                    changed = flag.view(here.shape).to(here.device) > 0
                    here.copy_(torch.where(changed, new.to(here.device), here))
                    compact(statistic.start).copy_(here)
        self.starts += 1
        self._before = self._before or before
        self._note()

    def undo(self) -> None:
        """Restore the values of the start of the step, also if it has ended."""
        before, self._before = self._before, []
        for (_, _, start, _), values in zip(self.statistics, before, strict=bool(before)):
            compact(start).copy_(values)
        self.starts += bool(before)
        self.restore()
