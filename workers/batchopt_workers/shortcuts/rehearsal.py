"""A rehearsal: an eager evaluation in which every operation is looked at, to learn whether it can be recorded.

A recording that fails may leave the driver in disorder, and one that succeeds may have taken a number from Python that
is another one the next time. So what would be recorded is looked at before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchopt_workers.life.torch_settings import module_hooks
from batchopt_workers.wire.structures import tensors_in

_OF_DATA = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
# Operations that take a list of indices, and wait for elements only where one of these is a mask.
_BY_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_MASKS = torch.bool, torch.uint8


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, look for an `obstacle` to recording, which is None as long as there is none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self.obstacle: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and carry it out."""
        given = {} if kwargs is None else kwargs
        found = func(*args, **given)
        if self.obstacle is None:
            self.obstacle = self._obstacle(func, (args, given), found)
        return found

    def _obstacle(self, func: Any, given: Any, found: Any) -> str | None:
        name = func._schema.name.removeprefix("aten::")
        if name in _BY_INDICES:
            waits = any(index is not None and index.dtype in _MASKS for index in given[0][1])
        else:
            waits = any(tag in func.tags for tag in _OF_DATA)
        if waits:
            return f"'{name}' waits for elements (as .item(), an `if` of a tensor, or a boolean mask do)"
        if any(tensor.device.type != self._type for tensor in tensors_in((given, found))):
            return f"'{name}' uses a tensor that is not on the card (on the CPU, say, even if it is a single number)"
        return None


def obstacle_of(module: torch.nn.Module) -> str | None:
    """Return why evaluations of a module must not go without its Python, as far as that can be told from outside."""
    if torch.is_anomaly_enabled():
        return "torch detects anomalies"
    if any(isinstance(found, dict) and found for found in module_hooks().values()):
        return "there are hooks of all modules"
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"'{name}' was made by torch.jit"
        for registry, found in vars(part).items():
            if registry.endswith("_hooks") and registry.startswith(("_forward", "_backward")) and found:
                return f"'{name}' has hooks"
    return None


def is_held(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether something refers to an autograd graph of these parameters, such as an output that is kept: its nodes
    that add gradients up are used again by the next backward. Such a node keeps its metadata as long as anything refers
    to it."""
    mark = object()
    for parameter in parameters:
        if parameter.requires_grad:
            _metadata(parameter)[__name__] = mark
            if _metadata(parameter).pop(__name__, None) is mark:
                return True
    return False


def _metadata(parameter: torch.Tensor) -> Any:
    """Return the metadata of the node that adds up its gradients, which is made anew where nothing refers to it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node.metadata
