"""Undoing a step: restores the parameters and the optimizer's state."""

from __future__ import annotations

from typing import Any

import torch

from batchopt.optim.curvature import Curvature
from batchopt_workers.wire.structures import PLAIN


class Rollback:
    """Keeps X and the state of an optimizer as of the last `take`. Tensors in the optimizer's state are copied, into
    reused memory; of lists (the history of torch's L-BFGS) the items are kept, which are appended and dropped but not
    written. A `Curvature` would be too large to copy at each step: if it has changed since, it is forgotten."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self._optimizer: torch.optim.Optimizer | None = None
        self._copy = torch.empty_like(vector)
        self._state: dict[Any, dict[Any, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._curvatures: list[tuple[Curvature, int]] = []

    def take(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Remember the current state."""
        self._optimizer = optimizer
        with torch.no_grad():
            self._copy.copy_(self._vector)
        if self._optimizer is not None:
            kept, self._state, self._curvatures = self._state, {}, []
            for parameter, state in self._optimizer.state.items():  # a loop: a comprehension is another call
                room, own = kept.get(parameter, {}), self._state.setdefault(parameter, {})
                for key, value in state.items():
                    own[key] = _kept(value, room.get(key))
                    if isinstance(value, Curvature):
                        self._curvatures.append((value, value.changes))
            self._groups = []
            for group in self._optimizer.param_groups:
                self._groups.append(of_group := {})
                for key, value in group.items():
                    of_group[key] = value if type(value) in PLAIN else _kept(value, None)

    def back(self) -> None:
        """Restore everything. The optimizer then owns the copies: call `take` before the next `back`."""
        with torch.no_grad():
            self._vector.copy_(self._copy)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for curvature, changes in self._curvatures:
            if curvature.changes != changes:
                curvature.clear()
        groups = self._optimizer.param_groups
        del groups[len(self._groups) :]
        for group, before in zip(groups, self._groups, strict=True):
            group.update(before)
        self._state = {}


def _kept(value: Any, room: Any) -> Any:
    """Return a copy of a tensor, in `room` if it fits there, or of a list; anything else unchanged."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        if not isinstance(room, torch.Tensor) or room.shape != value.shape or room.dtype != value.dtype:
            return value.detach().clone()
        return room.copy_(value.detach())
    return list(value) if isinstance(value, list) else value
