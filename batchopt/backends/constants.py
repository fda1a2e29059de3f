"""What workers need of the module beside X: frozen parameters and buffers, in shared memory, and its modes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchopt_workers.memory import SharedBlock
from batchopt_workers.packing import Packed

Place = tuple[torch.nn.Module, str]


def constants(module: torch.nn.Module) -> list[tuple[Place, torch.Tensor]]:
    """The frozen parameters and the buffers of a module, and where each is registered."""
    found = []
    for owner in module.modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
                found.append(((owner, name), tensor))
    return found


def check_form(place: Place, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise `ValueError` unless the tensor at `place` still has the shape and dtype that the workers have."""
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"'{place[1]}' of {type(place[0]).__name__} was {tuple(shape)} {dtype} when this "
            f"BatchOptimizer was built and is now {tuple(tensor.shape)} {tensor.dtype}: build a new one"
        )


def flags(module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[bool], list[bool]]:
    """Training mode of each submodule, and `requires_grad` of each parameter of X."""
    return [m.training for m in module.modules()], [p.requires_grad for p in parameters]


class Constants:
    """Keeps the frozen parameters and the buffers of the user's module in memory that the workers read.

    They become views of the workers' block, so that whatever is written to them, however, is what the workers have at
    the next step. A version counter would not do: `.data` and batch normalisation go past it.
    """

    def __init__(self, module: torch.nn.Module, packed: Packed, block: SharedBlock) -> None:
        """Put all tensors of the packed program into `block`."""
        self._module, self._block = module, block
        block.keep_apart()
        placed = {id(t): view for t, view in zip(packed.tensors, packed.place(block), strict=True)}
        self._views = {key: placed[id(tensor)] for key, tensor in constants(self._module) if id(tensor) in placed}
        self._bind()

    def _bind(self) -> None:
        for key, tensor in constants(self._module):
            if key in self._views:
                tensor.data = self._views[key]

    def refresh(self) -> None:
        """Take over tensors that were given other memory since the last call; the workers must be idle.

        Raises `ValueError` for a tensor of another shape or dtype than the workers have.
        """
        with torch.no_grad():
            for key, tensor in constants(self._module):
                view = self._views.get(key)
                if view is None or view.data_ptr() == tensor.data_ptr():
                    continue
                check_form(key, tensor, view.shape, view.dtype)
                view.copy_(tensor)
        self._bind()

    def close(self) -> None:
        """The workers are gone: the tensors stay where they are, in memory of this process alone."""
        self._block.make_private()
