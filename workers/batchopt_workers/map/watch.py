"""Detection of writes to tensors that no chunk may change: the samples of a batch, the parameters, constants."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from batchopt_workers.data.batch import Batch, Columns
from batchopt_workers.data.mapping import shows_file
from batchopt_workers.data.memory import octets
from batchopt_workers.data.packing import can_be_placed, copy_into
from batchopt_workers.data.places import version_of
from batchopt_workers.data.structures import same_values, tensors_in
from batchopt_workers.map.record import Record

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


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether its elements can be copied and compared."""
    return tensor.layout is torch.strided and not tensor.is_meta


class Elements:
    """The elements of a tensor, to be compared later with an `original`, or else with a copy as they are now.

    A large tensor is not copied, unless an original is given; then there is only what tells whether it was written: the
    state of its pages if it is in a private mapping of a file (`mapped`), or a checksum.
    """

    def __init__(self, tensor: torch.Tensor, original: torch.Tensor | None = None, mapped: bool = False) -> None:
        self.tensor = tensor
        is_large = tensor.nbytes >= _LARGE and tensor.is_contiguous() and can_be_placed(tensor)
        self._in_file = is_large and mapped and (original is not None or shows_file(tensor.data_ptr(), tensor.nbytes))
        self._original = tensor.detach().clone() if original is None and not is_large else original
        self._sum = _checksum(tensor) if self._original is None and not self._in_file else 0

    def are_same(self) -> bool:
        """Tell whether nobody has written them."""
        if self._in_file and shows_file(self.tensor.data_ptr(), self.tensor.nbytes):
            return True
        if self._original is not None:
            return same_values(self.tensor, self._original)
        return not self._in_file and _checksum(self.tensor) == self._sum

    def put_back(self) -> None:
        """Restore them, if there is a copy or an original."""
        if self._original is not None:
            copy_into(self.tensor, self._original)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(octets(tensor).numpy().data)


class ParameterWatch:
    """Ensures that code of the user, called `what`, does not change the parameters. Those that are mapped read-only
    (`protected`) cannot be written; others are compared with copies."""

    def __init__(
        self, module: torch.nn.Module, parameters: Sequence[torch.Tensor], protected: bool, what: str = "the function"
    ) -> None:
        self._what = what
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._before = [
            (parameter, data, parameter.requires_grad, None if protected else Elements(data, data.clone()))
            for parameter, data in ((parameter, parameter.data) for parameter in parameters)
        ]

    def check(self) -> None:
        """Raise `ValueError` if one was changed, after restoring all."""
        changed = ""
        for parameter, data, requires_grad, elements in self._before:
            is_written = elements is not None and not elements.are_same()
            if elements is not None and is_written:
                elements.put_back()
            if is_written or parameter.data_ptr() != data.data_ptr() or parameter.requires_grad != requires_grad:
                changed = self._names.get(id(parameter), "")
                parameter.data = data
                parameter.requires_grad_(requires_grad)
        if changed:
            raise ValueError(
                f"{self._what} changes the parameter {changed!r}: all workers share it, and f would be another one; "
                "work on a copy (torch.func.functional_call), or change it between steps"
            )


class BatchWatch:
    """Detects writes to the samples of a chunk."""

    def __init__(self, batch: Batch, samples: range) -> None:
        self._samples = samples
        self.versions: list[int] = []  # of `counted`, when the chunk began
        self.contents: list[tuple[str, Record, list[Elements]]] = []
        self.rebind(batch)

    def rebind(self, batch: Batch) -> None:
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
            contents = Record({name: whole(rows.start, rows.stop)}, functions=False)
            elements = [Elements(found.tensor, mapped=mapped) for found in contents.tensors if is_plain(found.tensor)]
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
