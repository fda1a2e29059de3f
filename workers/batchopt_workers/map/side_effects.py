"""Side effects of the user's code that is no part of f (a hook, a function of `collect`): they last for a piece only.

When samples are evaluated in a process for the first time, everything that such code may write is compared with what it
was, and taken back. Comparing costs more than a small chunk. So later what hooks change is looked for in attributes, in
state and, by version counters, in constants; once one has been seen to write, in all again, by all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from batchopt_workers.data.places import compact
from batchopt_workers.data.structures import same_values
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.record import Record, Undo
from batchopt_workers.map.watch import ParameterWatch, StateWritten
from batchopt_workers.process.torch_settings import AmbientState
from batchopt_workers.worker import Worker

# The name, among those of the state that forwards write, by which all workers learn that hooks write something that f
# depends on. No attribute has it.
HOOKS = "what hooks write"

T = TypeVar("T")


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


class SideEffectWatch:
    """Takes back, at the end of a piece, what hooks and functions of the user have changed for it.

    `compares`: the samples at hand are evaluated here for the first time. `protected`: the parameters cannot be
    written. `undo`: what is to be taken back at the end of the piece.
    """

    def __init__(self, worker: Worker, state: ModuleState, parameters: Sequence[torch.Tensor]) -> None:
        self.compares = self.protected = False
        self.undo: list[Undo] = []
        self._worker, self._state, self._parameters = worker, state, parameters
        self._is_seen = False  # that a hook writes anything
        self._contents: Record | None = None

    def note(self) -> Record:
        """Return what module and criterion hold now, kept until they change."""
        if self._contents is None or self._contents.changes():
            worker = self._worker
            self._contents = Record({"module": worker.module, "criterion": worker.criterion}, functions=False)
        return self._contents

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo, at the end of the body, what it changed in the module, the criterion and the modes of torch."""
        effects = SideEffects(self.note(), self._state)
        try:
            yield
        finally:
            for undo in effects.undo():
                undo()

    @property
    def _looks_closely(self) -> bool:
        return self.compares or self._is_seen or HOOKS in self._state.state

    def call(self, name: str, hook: Callable[[], T]) -> T:
        """Call a hook, whose changes last for its piece only. Raise `ValueError` if it changes a parameter."""
        if not self._looks_closely:
            constants, modes, state = self._state.constants.versions, _modes(), self._state.copies()
            found = hook()
            if self._state.constants.versions != constants:
                self._state.constants.refuse_unless_restored(f"`{name}`")
                raise StateWritten((HOOKS,))
            if _modes() != modes or not all(map(same_values, self._state.copies(), state)):
                raise StateWritten((HOOKS,))
            return found
        assert self._worker.module is not None
        parameters = ParameterWatch(self._worker.module, self._parameters, self.protected, f"`{name}`")
        effects = SideEffects(self.note(), self._state)
        try:
            found = hook()
        finally:
            changes = effects.undo()
            self.undo += changes
            self._is_seen = self._is_seen or bool(changes)
        parameters.check()
        return found

    def put_back(self) -> None:
        """Take back what was changed for a piece."""
        while self.undo:
            self.undo.pop()()

    def check(self) -> None:
        """Raise `StateWritten` if something has changed attributes in a chunk that is not looked at closely: it is
        evaluated again, and then compared."""
        if self._looks_closely or self._contents is None:
            return
        changes = self._contents.changes()
        if changes:
            for undo in changes:
                undo()
            raise StateWritten((HOOKS,))


def _modes() -> tuple[bool, torch.dtype]:
    return torch._C._is_any_autocast_enabled(), torch.get_default_dtype()
