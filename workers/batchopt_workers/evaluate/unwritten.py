"""Tensors that no chunk may write: whatever a program holds beside X and its state, and the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from batchopt_workers.batch.batch import Batch
from batchopt_workers.wire.structures import tensors_in

version = attrgetter("_version")  # of a tensor that has a version counter


class Unwritten:
    """Notices writes in place by version counters. Other ways (`.data`, NumPy) are noticed by what comes of them: a
    fresh copy finds something else (see `audit`)."""

    def __init__(self, tensors: Iterable[torch.Tensor], name: Callable[[torch.Tensor], str], advice: str) -> None:
        """`name`: says which tensor it is; `advice`: what to do instead, for the error."""
        self.tensors = [*tensors]
        if any(map(torch.Tensor.is_inference, self.tensors)):  # these count nothing, and cannot be written
            self.tensors = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.begun: list[int] = []  # their versions when a chunk began
        self._name, self._advice = name, advice

    def refuse(self) -> None:
        """Raise `ValueError` for the first tensor that was written since the chunk began."""
        written = [own for own, before in zip(self.tensors, self.begun, strict=True) if own._version != before]
        raise ValueError(f"forward, loss or a hook writes {self._name(written[0])} in place: {self._advice}")


def constants(named: Iterable[tuple[str, torch.Tensor]]) -> Unwritten:
    """Return the tensors of a program that no chunk may write, with their names."""
    found = [*named]

    def name(tensor: torch.Tensor) -> str:
        return next(f"'{path}'" for path, own in found if own is tensor)

    advice = "what a forward writes has to be a buffer (register_buffer) of up to 2**20 elements"
    return Unwritten([tensor for _, tensor in found], name, advice)


def samples(tensors: Iterable[torch.Tensor], batch: Batch) -> Unwritten:
    """Return the tensors from which samples of a batch are read."""

    def name(tensor: torch.Tensor) -> str:
        targets = [part.targets for part in batch.parts if part.targets is not None]
        of_targets = [own for form in targets for own in tensors_in(form.held(0, batch.size))]
        return "its `targets`" if any(own is tensor for own in of_targets) else "its `inputs`"

    advice = "the next evaluation would see other data; write to a copy (x = x / 2, x.clone())"
    return Unwritten(tensors, name, advice)
