"""The tensors of a module, wherever it has them, and their elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# In elements. A larger tensor is a constant (data kept with the module): all workers share one copy, and a forward
# that writes it raises an error.
LARGEST_STATISTIC = 2**20


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Yield every tensor that a part of `module` has as a buffer, parameter or attribute: its path, the part, its name
    there, and the tensor; tied tensors once per place."""
    for path, owner in module.named_modules():
        for holder in (owner._buffers, owner._parameters, vars(owner)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}".lstrip("."), owner, name, value


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of its elements, each once, as real numbers: without the dimensions along which it is expanded."""
    if 0 not in tensor.stride() and not tensor.is_complex():
        return tensor
    tensor = tensor.detach()
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
