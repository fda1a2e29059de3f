"""Where each trainable parameter lies in the one flat vector X."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements `offset` to `offset + numel` of the vector, in row-major order."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """The slots of every trainable parameter, without gaps, and what they are made of."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Layout:
        """Lay `(name, parameter)` pairs out one after the other."""
        slots, offset = [], 0
        for name, parameter in parameters:
            slots.append(Slot(name, tuple(parameter.shape), offset))
            offset += parameter.numel()
        return cls(tuple(slots), dtype)

    @property
    def size(self) -> int:
        """Elements of the whole vector."""
        return self.slots[-1].offset + self.slots[-1].numel if self.slots else 0

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums of gradients: at least single precision."""
        return torch.promote_types(self.dtype, torch.float32)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `vector` (shape `(size,)`), each in its slot's shape, sharing its memory.

        In main memory each is a storage of its own: to save, pickle or share one of them takes its bytes, not all.
        """
        if vector.device.type != "cpu":
            return [vector[s.offset : s.offset + s.numel].view(s.shape) for s in self.slots]
        memory = vector.detach().view(torch.uint8).numpy()
        return [_view(memory, vector.dtype, slot) for slot in self.slots]


def _view(memory: npt.NDArray[np.uint8], dtype: torch.dtype, slot: Slot) -> torch.Tensor:
    if not slot.numel:
        return torch.empty(slot.shape, dtype=dtype)
    offset = slot.offset * dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=slot.numel, offset=offset).view(slot.shape)
