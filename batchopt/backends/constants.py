"""What workers need of the module beside X: frozen parameters and buffers, in shared memory, and its modes."""

from __future__ import annotations

import torch

from batchopt_workers.memory import SharedBlock
from batchopt_workers.packing import Packed

_Key = tuple[torch.nn.Module, str]


class Constants:
    """Follows the frozen parameters and buffers of the user's module, and rewrites the workers' copy when they change."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._views: dict[_Key, torch.Tensor] = {}
        self._seen: dict[_Key, tuple[int, int]] = {}

    def _tensors(self) -> list[tuple[_Key, torch.Tensor]]:
        found = []
        for owner in self._module.modules():
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is not None and not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
                    found.append(((owner, name), tensor))
        return found

    def place(self, packed: Packed, block: SharedBlock) -> None:
        """Put all tensors of the packed program into `block`."""
        placed = {id(t): view for t, view in zip(packed.tensors, packed.place(block), strict=True)}
        for key, tensor in self._tensors():
            if id(tensor) in placed:
                self._views[key] = placed[id(tensor)]
                self._seen[key] = (id(tensor), tensor._version)

    def refresh(self) -> None:
        """Copy what has changed since the last call; the workers must be idle.

        Raises `ValueError` for a tensor of another shape or dtype than the workers have.
        """
        with torch.no_grad():
            for key, tensor in self._tensors():
                view = self._views.get(key)
                if view is None or self._seen[key] == (id(tensor), tensor._version):
                    continue
                if view.shape != tensor.shape or view.dtype != tensor.dtype:
                    raise ValueError(
                        f"'{key[1]}' of {type(key[0]).__name__} was {tuple(view.shape)} {view.dtype} when this optimizer was built and is now "
                        f"{tuple(tensor.shape)} {tensor.dtype}: build a new BatchOptimizer"
                    )
                view.copy_(tensor)
                self._seen[key] = (id(tensor), tensor._version)

    def flags(self, parameters: list[torch.nn.Parameter]) -> tuple[list[bool], list[bool]]:
        """Training mode of each submodule, and `requires_grad` of each parameter of X."""
        return [m.training for m in self._module.modules()], [p.requires_grad for p in parameters]
