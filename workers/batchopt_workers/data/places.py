"""The tensors of a module, and their places in it: buffers, frozen parameters and attributes."""

from __future__ import annotations

from collections.abc import Iterator
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

    @property
    def is_registered(self) -> bool:
        """Tell whether it is that of a buffer or a parameter."""
        return self.name in self.owner._buffers or self.name in self.owner._parameters

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


def tensors_of(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, Place]]:
    """Yield the name and place of every tensor that a part of `module` has as a buffer, parameter or attribute; tied
    tensors once per place."""
    for path, owner in module.named_modules(prefix=prefix):
        for holder in (owner._buffers, owner._parameters, vars(owner)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}".lstrip("."), Place(owner, name)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of its elements, each once, as real numbers: without the dimensions along which it is expanded."""
    if 0 not in tensor.stride() and not tensor.is_complex():
        return tensor
    tensor = tensor.detach()
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
