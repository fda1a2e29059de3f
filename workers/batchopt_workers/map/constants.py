"""Constants: the tensors of a program that no chunk may change, and what tells that one did.

What must hold: each chunk reads them as they were at the start of the step, in every worker. So a write is noticed
after the chunk that made it, whatever way it took, and put back; the error names the tensors, which belong to the
module's state from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from batchopt_workers.data.places import Place, tensors_of
from batchopt_workers.map.record import Undo
from batchopt_workers.map.watch import Elements, StateWritten, is_plain, version


class _Constant(NamedTuple):
    """A constant tensor. `place`: its place in the module, or None; `registered`: it is a buffer or a parameter."""

    name: str
    tensor: torch.Tensor
    place: Place | None
    registered: bool

    @property
    def is_replaced(self) -> bool:
        return self.registered and self.place is not None and self.place.now() is not self.tensor


class Constants:
    """The tensors of a program that are neither parameters of X nor state.

    In-place writes are detected by version counters, replacements by identity. Writes that bypass the counter (`.data`)
    are detected by comparison with originals: when a chunk is evaluated here for the first time, and where code of the
    user runs that is not part of f. After most chunks there is nothing to check: those that are `held` in the module
    may have been replaced, and those that are `counted` have had the versions `begun` before the first chunk.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        others: Iterable[tuple[str, torch.Tensor]],
        variable: Iterable[torch.Tensor],
        twins: Mapping[int, torch.Tensor],
        discard: Callable[[], object] | None,
    ) -> None:
        """`others`: tensors of the program by name, inside or outside the module; `variable`: those that may change;
        `twins`: originals of constants, by the identity of these, which `discard` restores. Without them, copies are
        made when they are needed."""
        known = set(map(id, variable))
        named = [(name, place.get(), place) for name, place in tensors_of(module)]
        self._constants: list[_Constant] = []
        for name, tensor, place in [*named, *((name, tensor, None) for name, tensor in others)]:
            if id(tensor) not in known:
                known.add(id(tensor))
                self._constants.append(_Constant(name, tensor, place, place is not None and place.is_registered))
        self.counted = [constant.tensor for constant in self._constants if not constant.tensor.is_inference()]
        self._none = [
            (f"{path}.{name}".lstrip("."), owner._buffers, name)
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is None
        ]
        placed = [(c.place, c.tensor) for c in self._constants if c.place is not None and c.registered]
        held: list[tuple[dict[str, Any], str, object]] = [
            (place.holder(), place.name, tensor) for place, tensor in placed
        ]
        held += [(buffers, name, None) for _, buffers, name in self._none]
        # parts made by torch.jit hold them in no dict: these never look the same at once
        self.held = [(holder if type(holder) is dict else {}, name, tensor) for holder, name, tensor in held]
        self._module, self._parameters = module, {name for name, _ in module.named_parameters()}
        self.examines = False
        self._continues = False  # comparing after each chunk, not only the next one
        self._discard = discard
        self._originals = {
            id(c.tensor): Elements(c.tensor, twins[id(c.tensor)], mapped=True)
            for c in self._constants
            if id(c.tensor) in twins
        }
        self.begun: list[int] = []

    def compare(self) -> None:
        """Compare the constants with their originals after the next chunk. Copies that serve as originals are kept
        until the next `begin`."""
        self.examines = True
        if self._discard is None and not self._originals:
            tensors = [constant.tensor for constant in self._constants if is_plain(constant.tensor)]
            self._originals = {id(tensor): Elements(tensor, tensor.detach().clone()) for tensor in tensors}

    def begin(self, compares: bool = False) -> None:
        """Begin a run of chunks. `compares`: constants are compared with their originals after each."""
        self._continues = compares
        if self._discard is None:
            self._originals = {}
        if compares:
            self.compare()
        self.begun = [*map(version, self.counted)]

    @property
    def versions(self) -> list[int]:
        """The number of writes in place of each constant."""
        return [*map(version, self.counted)]

    def excuse(self, before: Sequence[int]) -> Undo | None:
        """Return a function that restores the constants that a hook has written since it began, when their `versions`
        were `before`; None if there are none. `compare` must have been called.

        The function excuses these writes, and no others: what forward writes, before the hook or after it, `check`
        reports.
        """
        after, changed, kept = self.versions, self._written_since(before), self._originals.items()
        written = [original for key, original in kept if key in changed or not original.are_same()]
        if not written:
            return None

        def restore() -> None:
            alone = before == self.begun and self.versions == after
            if self._discard is not None:  # a copy would be this process's own, and not follow the parent's
                self._discard()
            else:
                for original in written:
                    original.put_back()
            if alone:
                self.begun = self.versions

        return restore

    def check(self) -> None:
        """Raise `StateWritten`, or `ValueError` for what cannot be state, if the chunk wrote something; constants are
        put back as they were at `begin`."""
        if not self.examines and [*map(version, self.counted)] == self.begun:
            for holder, name, tensor in self.held:
                if holder.get(name) is not tensor:
                    break
            else:
                return
        changed = self._written_since(self.begun)
        written = [
            constant
            for constant in self._constants
            if id(constant.tensor) in changed
            or constant.is_replaced
            or (self.examines and self._differs(constant.tensor))
        ]
        made = [name for name, buffers, name_there in self._none if buffers[name_there] is not None]
        if written or made:
            self.put_back()
        parameters = self._module.named_parameters() if self.examines else ()
        new = [name for name, _ in parameters if name not in self._parameters]
        self.examines = self._continues
        if new:
            raise ValueError(
                f"the parameter '{new[0]}' was made by the first forward, and is not in X: call the module once "
                "before it is given to batchopt"
            )
        if made:
            raise ValueError(
                f"the buffer '{made[0]}' was None, and forward made it a tensor: call the module once before it is "
                "given to batchopt, or register it with its shape"
            )
        others = [constant.name for constant in written if constant.place is None]
        if others:
            raise ValueError(
                f"forward or loss write the tensor '{others[0]}', which is no buffer: make it one of the module "
                "(register_buffer), so that each step begins with one value of it; or write it between steps"
            )
        if written:
            raise StateWritten([constant.name for constant in written])

    def refuse_unless_restored(self, what: str) -> None:
        """Raise `ValueError` if a constant that `what` has written cannot be restored: it has in evaluations before,
        too, or would have been copied."""
        if self._discard is None:
            raise ValueError(
                f"{what} writes a frozen parameter, a tensor of the criterion or a large buffer, and did not when "
                "these samples were evaluated first: its value from before is lost; write a copy, or between steps"
            )

    def put_back(self) -> None:
        """Put back constants that were replaced, and those that there are originals of."""
        for constant in self._constants:
            if constant.is_replaced and constant.place is not None:
                constant.place.set(constant.tensor)
            if id(constant.tensor) in self._originals and constant.tensor.grad_fn is not None:
                constant.tensor.detach_()
            if self._differs(constant.tensor):
                self._originals[id(constant.tensor)].put_back()
        for _, buffers, name in self._none:
            buffers[name] = None

    def _written_since(self, versions: Sequence[int]) -> set[int]:
        pairs = zip(self.counted, versions, strict=True)
        return {id(tensor) for tensor, before in pairs if tensor._version != before}

    def _differs(self, tensor: torch.Tensor) -> bool:
        original = self._originals.get(id(tensor))
        return original is not None and not original.are_same()
