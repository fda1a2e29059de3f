"""What workers need of the module beside X: frozen parameters and buffers, in shared memory, and its modes."""

from __future__ import annotations

import torch

from batchopt_workers.memory import SharedBlock
from batchopt_workers.packing import Packed

_Key = tuple[torch.nn.Module, str]


class Constants:
    """Keeps the frozen parameters and the buffers of the user's module in memory that the workers read.

    They become views of the workers' block, so that whatever is written to them, however, is what the workers have at
    the next step. A version counter would not do: `.data` and batch normalisation go past it.
    """

    def __init__(self, module: torch.nn.Module, packed: Packed, block: SharedBlock) -> None:
        """Put all tensors of the packed program into `block`."""
        self._module = module
        placed = {id(t): view for t, view in zip(packed.tensors, packed.place(block), strict=True)}
        self._views = {key: placed[id(tensor)] for key, tensor in self._tensors() if id(tensor) in placed}
        self._bind()

    def _tensors(self) -> list[tuple[_Key, torch.Tensor]]:
        found = []
        for owner in self._module.modules():
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is not None and not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
                    found.append(((owner, name), tensor))
        return found

    def _bind(self) -> None:
        for key, tensor in self._tensors():
            if key in self._views:
                tensor.data = self._views[key]

    def refresh(self) -> None:
        """Take over tensors that were given other memory since the last call; the workers must be idle.

        Raises `ValueError` for a tensor of another shape or dtype than the workers have.
        """
        with torch.no_grad():
            for key, tensor in self._tensors():
                view = self._views.get(key)
                if view is None or view.data_ptr() == tensor.data_ptr():
                    continue
                if view.shape != tensor.shape or view.dtype != tensor.dtype:
                    raise ValueError(
                        f"'{key[1]}' of {type(key[0]).__name__} was {tuple(view.shape)} {view.dtype} when this "
                        f"BatchOptimizer was built and is now {tuple(tensor.shape)} {tensor.dtype}: build a new one"
                    )
                view.copy_(tensor)
        self._bind()

    def flags(self, parameters: list[torch.nn.Parameter]) -> tuple[list[bool], list[bool]]:
        """Training mode of each submodule, and `requires_grad` of each parameter of X."""
        return [m.training for m in self._module.modules()], [p.requires_grad for p in parameters]
