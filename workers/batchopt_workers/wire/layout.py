"""The place of each trainable parameter in the flat vector X."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements `offset` to `offset + numel` of the vector, in row-major order; for a complex one
    alternating real and imaginary parts."""

    name: str
    shape: tuple[int, ...]
    offset: int
    is_complex: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the vector."""
        return torch.Size(self.shape).numel() * (2 if self.is_complex else 1)

    def dtype(self, vector: torch.dtype) -> torch.dtype:
        """Return the parameter's dtype in a vector of that dtype."""
        return vector.to_complex() if self.is_complex else vector


@dataclass(frozen=True)
class Layout:
    """The slots of every trainable parameter, without gaps, and the real dtype of the vector.

    Complex ones come first: then each lies at a multiple of its element's size, if the vector begins at one.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Layout:
        """Lay out `(name, parameter)` pairs one after the other. `dtype`: of any of them."""
        slots, offset = [], 0
        for name, parameter in parameters:
            slots.append(Slot(name, tuple(parameter.shape), offset, parameter.is_complex()))
            offset += slots[-1].numel
        return cls(tuple(slots), dtype.to_real())

    @property
    def size(self) -> int:
        """Number of elements of the vector."""
        return self.slots[-1].offset + self.slots[-1].numel if self.slots else 0

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums of gradients: at least single precision."""
        return torch.promote_types(self.dtype, torch.float32)

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of `vector` (shape `(size,)`), each in its slot's shape and kind, sharing its memory.

        On the CPU each has a storage of its own: saving, pickling or sharing one of them takes its bytes, not all.
        """
        if vector.device.type != "cpu":
            parts = [vector[slot.offset : slot.offset + slot.numel] for slot in self.slots]
            return [part.view(s.dtype(part.dtype)).view(s.shape) for s, part in zip(self.slots, parts, strict=True)]
        memory = vector.detach().view(torch.uint8).numpy()
        return [_view(memory, vector.dtype, slot) for slot in self.slots]


def _view(memory: npt.NDArray[np.uint8], dtype: torch.dtype, slot: Slot) -> torch.Tensor:
    kind, count = slot.dtype(dtype), torch.Size(slot.shape).numel()
    if not count:
        return torch.empty(slot.shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=slot.offset * dtype.itemsize).view(slot.shape)


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return it as real numbers; complex ones become pairs of real and imaginary parts, in a new last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_form_of(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a vector of real numbers in the shape and kind of `tensor`: a copy, since not every part of a vector can
    be viewed as complex numbers, here or in the backward of a `view_as_real`."""
    own = numbers.clone()
    return torch.view_as_complex(own.view(*tensor.shape, 2)) if tensor.is_complex() else own.view(tensor.shape)
