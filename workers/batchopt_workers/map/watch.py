"""Detection of writes in a forward to tensors that no chunk may change: constants of the program, and the batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from batchopt_workers.data.batch import Batch, Columns
from batchopt_workers.data.mapping import shows_file
from batchopt_workers.data.memory import octets
from batchopt_workers.data.packing import can_be_placed, copy_into
from batchopt_workers.data.structures import same_values, tensors_in
from batchopt_workers.map.buffers import Place, tensors_of, version_of
from batchopt_workers.map.contents import Contents, Undo

# Bytes from which comparing a tensor takes longer than finding out whether its pages were written.
_LARGE = 2**18

version = attrgetter("_version")  # of a tensor that has a version counter


class StateWritten(Exception):
    """A forward writes tensors of the module that were taken for constants, called `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"forward writes {', '.join(map(repr, names))}")
        self.names = tuple(names)

    def __reduce__(self) -> tuple[type[StateWritten], tuple[tuple[str, ...]]]:
        return type(self), (self.names,)


class _Constant(NamedTuple):
    """A constant tensor. `place`: its place in the module, or None; `registered`: it is a buffer or a parameter."""

    name: str
    tensor: torch.Tensor
    place: Place | None
    registered: bool


class Watch:
    """The tensors of a program that are neither parameters of X nor state.

    In-place writes are detected by version counters, replacements by identity. Writes that bypass the counter (`.data`)
    are detected by comparison with originals: when a chunk is evaluated here for the first time, and where code of the
    user runs that is not part of f.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        others: Iterable[tuple[str, torch.Tensor]],
        variable: Iterable[torch.Tensor],
        twins: Mapping[int, torch.Tensor] | None = None,
        discard: Callable[[], object] | None = None,
    ) -> None:
        """`others`: tensors of the program by name, inside or outside the module; `variable`: those that may change;
        `twins`: originals of constants, by the identity of these, which `discard` restores. Without them, copies are
        made when they are needed."""
        known = {id(tensor) for tensor in variable}
        self._constants: list[_Constant] = []
        for name, place in tensors_of(module):
            tensor = place.get()
            if id(tensor) not in known:
                known.add(id(tensor))
                registered = place.name in place.owner._buffers or place.name in place.owner._parameters
                self._constants.append(_Constant(name, tensor, place, registered))
        for name, tensor in others:
            if id(tensor) not in known:
                known.add(id(tensor))
                self._constants.append(_Constant(name, tensor, None, False))
        self._none = [
            (f"{path}.{name}".lstrip("."), owner._buffers, name)
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is None
        ]
        self._counted = [constant.tensor for constant in self._constants if not constant.tensor.is_inference()]
        placed = [c for c in self._constants if c.registered]
        holders = [(c.place.holder(), c.place.name, c.tensor) for c in placed if c.place is not None]
        # parts made by torch.jit hold them in no dict
        self._held = holders if all(type(holder) is dict for holder, _, _ in holders) else None
        self._holds_nothing = self._held == [] and not self._none
        self._module, self._parameters = module, {name for name, _ in module.named_parameters()}
        self._examines = False
        self._goes_on = False  # comparing after each chunk, not only the next one
        self._twins, self._discard = twins, discard
        self._originals: Mapping[int, torch.Tensor] = {}
        self._versions: list[int] = []

    def compare(self) -> None:
        """Compare the constants with their originals after the next chunk. Copies that serve as originals are kept
        until the next `begin`."""
        self._examines = True
        if self._twins is not None:
            self._originals = self._twins
        elif not self._originals:
            tensors = [constant.tensor for constant in self._constants]
            self._originals = {id(tensor): tensor.detach().clone() for tensor in tensors if _is_plain(tensor)}

    def begin(self, compares: bool = False) -> None:
        """Begin a run of chunks. `compares`: constants are compared with their originals after each."""
        self._goes_on, self._originals = compares, {}
        if compares:
            self.compare()
        self._versions = self.versions

    @property
    def versions(self) -> list[int]:
        """The number of writes in place of each constant."""
        return [*map(version, self._counted)]

    def excuse(self, before: Sequence[int]) -> Undo | None:
        """Return a function that restores the constants that a hook has written since it began, when their `versions`
        were `before`; None if there are none. `compare` must have been called.

        The function excuses these writes, and no others: what forward writes, before the hook or after it, `check`
        reports.
        """
        after = self.versions
        changed = {id(t) for t, one, two in zip(self._counted, before, after, strict=True) if one != two}
        known = [constant for constant in self._constants if id(constant.tensor) in self._originals]
        written = [constant for constant in known if id(constant.tensor) in changed or self._differs(constant)]
        if not written:
            return None

        def restore() -> None:
            alone = before == self._versions and self.versions == after
            if self._discard is not None:  # a copy would be this process's own, and not follow the parent's
                self._discard()
            else:
                for constant in written:
                    copy_into(constant.tensor, self._originals[id(constant.tensor)])
            if alone:
                self._versions = self.versions

        return restore

    def check(self) -> None:
        """Raise `StateWritten`, or `ValueError` for what cannot be state, if the chunk wrote something; constants are
        put back as they were at `begin`."""
        same = not self._examines and [*map(version, self._counted)] == self._versions
        if same and (self._holds_nothing or self._are_in_place):
            return
        before = dict(zip(map(id, self._counted), self._versions, strict=True))
        written = [
            constant
            for constant in self._constants
            if version_of(constant.tensor) != before.get(id(constant.tensor), 0)
            or self._is_replaced(constant)
            or self._differs(constant)
        ]
        made = [name for name, buffers, name_there in self._none if buffers[name_there] is not None]
        if written or made:
            self.put_back()
        new = (
            [name for name, _ in self._module.named_parameters() if name not in self._parameters]
            if self._examines
            else []
        )
        self._examines = self._goes_on
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

    @property
    def _are_in_place(self) -> bool:
        """Tell whether the module has the tensors that it had, and no more."""
        if self._held is None:
            return False
        for holder, name, tensor in self._held:
            if holder.get(name) is not tensor:
                return False
        return not self._none or all(buffers[name] is None for _, buffers, name in self._none)

    def put_back(self) -> None:
        """Put back constants that were replaced, and those that `compare` has originals of."""
        for constant in self._constants:
            if self._is_replaced(constant):
                assert constant.place is not None
                constant.place.set(constant.tensor)
            original = self._originals.get(id(constant.tensor))
            if original is not None:
                with torch.no_grad():
                    if constant.tensor.grad_fn is not None:
                        constant.tensor.detach_()
                    if not same_values(constant.tensor, original):
                        copy_into(constant.tensor, original)
        for _, buffers, name in self._none:
            buffers[name] = None

    def _is_replaced(self, constant: _Constant) -> bool:
        return constant.registered and constant.place is not None and constant.place.now() is not constant.tensor

    def _differs(self, constant: _Constant) -> bool:
        tensor = constant.tensor
        original = self._originals.get(id(tensor))
        if original is None:
            return False
        # With twins, a constant lies in a private mapping of theirs.
        if self._twins is not None and tensor.nbytes >= _LARGE and tensor.is_contiguous():
            if shows_file(tensor.data_ptr(), tensor.nbytes):
                return False
        return not same_values(tensor, original)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


class ParameterWatch:
    """Ensures that code of the user, called `what`, does not change the parameters. Those that are mapped read-only
    (`protected`) cannot be written; others are compared with copies."""

    def __init__(
        self, module: torch.nn.Module, parameters: Sequence[torch.Tensor], protected: bool, what: str = "the function"
    ) -> None:
        self._what = what
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._before = [
            (parameter, parameter.data, None if protected else parameter.detach().clone(), parameter.requires_grad)
            for parameter in parameters
        ]

    def check(self) -> None:
        """Raise `ValueError` if one was changed, after restoring all."""
        changed = ""
        for parameter, data, copy, requires_grad in self._before:
            if parameter.data_ptr() != data.data_ptr() or parameter.requires_grad != requires_grad:
                changed = self._names.get(id(parameter), "")
                parameter.data = data
                parameter.requires_grad_(requires_grad)
            if copy is not None and not (torch.equal(data, copy) or same_values(data, copy)):
                changed = self._names.get(id(parameter), "")
                with torch.no_grad():
                    parameter.copy_(copy)
        if changed:
            raise ValueError(
                f"{self._what} changes the parameter {changed!r}: all workers share it, and f would be another one; "
                "work on a copy (torch.func.functional_call), or change it between steps"
            )


class _Elements:
    """The elements of a tensor, to be compared later: a copy, or of a large tensor only what tells whether they were
    written: the state of its pages if it is in a private mapping of a file (`mapped`), else a checksum."""

    def __init__(self, tensor: torch.Tensor, mapped: bool) -> None:
        self.tensor, self._sum = tensor, 0
        self._copy: torch.Tensor | None = None
        is_large = tensor.nbytes >= _LARGE and tensor.is_contiguous() and can_be_placed(tensor)
        self._in_file = is_large and mapped and shows_file(tensor.data_ptr(), tensor.nbytes)
        if not is_large:
            self._copy = tensor.detach().clone()
        elif not self._in_file:
            self._sum = _checksum(tensor)

    def are_same(self) -> bool:
        """Tell whether nobody has written them."""
        if self._copy is not None:
            return same_values(self.tensor, self._copy)
        if self._in_file:
            return shows_file(self.tensor.data_ptr(), self.tensor.nbytes)
        return _checksum(self.tensor) == self._sum

    def put_back(self) -> None:
        """Restore them, if there is a copy."""
        if self._copy is not None:
            copy_into(self.tensor, self._copy)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(octets(tensor).numpy().data)


class BatchWatch:
    """Detects writes to the samples of a chunk."""

    def __init__(self, batch: Batch, samples: range) -> None:
        self._samples = samples
        self.versions: list[int] = []  # of `counted`, when the chunk began
        self.contents: list[tuple[str, Contents, list[_Elements]]] = []
        self.follow(batch)

    def follow(self, batch: Batch) -> None:
        """Watch the same samples of another batch."""
        self._batch = batch
        if batch.plain is not None:
            self.counted = batch.plain.tensors
        else:
            self.counted = [tensor for _, tensor in self._tensors() if not tensor.is_inference()]

    def _forms(self) -> list[tuple[str, Any, range]]:
        """List inputs and targets, and the rows there of the samples."""
        parts = ((self._batch.parts[term], samples) for term, samples in self._batch.numbering.split(self._samples))
        return [
            (name, form, range(samples.start - part.first, samples.stop - part.first))
            for part, samples in parts
            for name, form in (("inputs", part.inputs), ("targets", part.targets))
            if form is not None
        ]

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, tensor)
            for name, form, rows in self._forms()
            for tensor in tensors_in(form.held(rows.start, rows.stop))
        ]

    def look(self, mapped: bool) -> None:
        """Record all that the samples hold, at the beginning of a chunk; `check` compares it. `mapped`: they are in
        private mappings of files."""
        for name, form, rows in self._forms():
            whole = form.slice if isinstance(form, Columns) else form.held
            contents = Contents((whole(rows.start, rows.stop),))
            elements = [_Elements(tensor, mapped) for tensor in contents.tensors if _is_plain(tensor)]
            self.contents.append((name, contents, elements))

    def check(self) -> None:
        """Raise `ValueError` if the chunk, which has ended, wrote its own samples: the next evaluation would see other
        data. What was compared is put back."""
        before = dict(zip(map(id, self.counted), self.versions, strict=True))
        written = [
            (name, f"a tensor of shape {tuple(tensor.shape)}")
            for name, tensor in self._tensors()
            if version_of(tensor) != before.get(id(tensor), 0)
        ]
        for name, contents, elements in self.contents:
            if contents.changes():
                contents.put_back()
                written.append((name, "an object in there"))
            for found in elements:
                if not found.are_same():
                    found.put_back()
                    written.append((name, f"a tensor of shape {tuple(found.tensor.shape)}"))
        self.contents = []
        for name, what in written[:1]:
            raise ValueError(
                f"forward, a hook or `collate_fn` writes its `{name}` in place ({what}): the next evaluation of the "
                "step would see other data; write to a copy (x = x / 2, x.clone()), and load the batch again"
            )
