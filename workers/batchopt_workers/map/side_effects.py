"""Records of what code of the user that is no part of f changes (a hook, a function of `collect`), to take it back."""

from __future__ import annotations

from functools import partial

import torch

from batchopt_workers.data.places import compact
from batchopt_workers.data.structures import same_values
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.record import Record, Undo
from batchopt_workers.process.torch_settings import AmbientState

# The name, among those of the state that forwards write, by which all workers learn that hooks write something that f
# depends on. No attribute has it.
HOOKS = "what hooks write"


class SideEffects:
    """A record made before the code runs: attributes and items (`contents`), the elements of a module's `state` and
    constants, and the modes of torch.

    Elements are compared one by one: `.data` and NumPy write them without a trace.
    """

    def __init__(self, contents: Record, state: ModuleState) -> None:
        self._contents, self._constants = contents, state.constants
        self._ambient = AmbientState()
        self._state = [*zip(state.tensors, state.copies(), strict=True)]
        self._constants.compare()
        self._versions = self._constants.versions

    def undo(self) -> list[Undo]:
        """Return functions that take back what has changed since; the modes of torch are restored at once."""
        found: list[Undo] = [lambda: None] if self._ambient.restore() else []
        found += self._contents.changes()
        for own, before in self._state:
            if not same_values(compact(own), before):
                found.append(partial(_put_back, own, before, compact(own).detach().clone()))
        excused = self._constants.excuse(self._versions)
        return found if excused is None else [*found, excused]


def _put_back(own: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    """Give a tensor of state the elements from before a hook wrote it. Raise `ValueError` if forward has written it
    since."""
    is_as_left = same_values(compact(own), after)
    with torch.no_grad():
        compact(own).copy_(before)
    if not is_as_left:
        raise ValueError(
            f"a hook and forward both write a tensor of the module, of shape {tuple(own.shape)}: what a hook writes "
            "lasts for its samples only, what forward writes is kept; write it in one of the two"
        )
