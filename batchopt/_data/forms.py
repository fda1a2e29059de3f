"""The form of a batch of plain tensors: another batch of the same form is read by looking only at its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from batchopt._data.batches import BatchSpec
from batchopt._data.denominators import own_denominators
from batchopt_workers.batch.batch import Batch, Columns, Part, Plain
from batchopt_workers.batch.weighting import Weighting

# Properties of a batch that are the same for all of one form.
PROPERTIES = ("size", "numbering", "is_read", "is_kept", "is_of_columns", "collates")
# Number of columns: of a tuple, or -1 for a tensor; None for no targets.
Count = int | None


@dataclass(frozen=True)
class BatchForm:
    """The common properties of batches that differ in the elements of their tensors only: the name, the weighting, and
    the number of columns of inputs and targets of each part; and the tensors' shapes, strides and dtypes."""

    parts: tuple[tuple[str | None, Weighting, Count, Count], ...]
    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    found: dict[str, Any] = field(compare=False)  # the values of its `PROPERTIES`

    def filled(self, inputs: Any, targets: Any, spec: BatchSpec) -> Batch | None:
        """Return the batch of this form with these inputs and targets, without terms; None if they do not fit."""
        name, weighting, *counts = self.parts[0]
        tensors: list[torch.Tensor] = []
        for data, count in zip((inputs, targets), counts, strict=True):
            if type(data) is torch.Tensor and count == -1:
                tensors.append(data)
            elif type(data) is tuple and count == len(data):
                tensors += data
            elif data is not None or count is not None:
                return None
        if _forms(tensors) != self.tensors:
            return None
        columns = None if targets is None else Columns(targets)
        if weighting.reduction == "mean" and own_denominators(spec.criterion, columns) is not None:
            return None
        batch = Batch((Part(Columns(inputs), columns, None, weighting, name=name),), Plain(self, tensors))
        vars(batch).update(self.found)
        return batch


def with_form(batch: Batch) -> Batch:
    """Return the batch with its form, if its columns are plain CPU tensors, or tuples of them, without weights, options
    and functions; otherwise return it unchanged."""
    parts = []
    tensors: list[torch.Tensor] = []
    for part in batch.parts:
        if part.options is not None or part.criterion_rows or part.weighting.running is not None or part.collate:
            return batch
        counts: list[Count] = []
        for columns in (part.inputs, part.targets):
            data = columns.data if isinstance(columns, Columns) else columns
            if data is not None and type(data) not in (torch.Tensor, tuple):
                return batch
            counts.append(len(data) if type(data) is tuple else None if data is None else -1)
            tensors += data if type(data) is tuple else () if data is None else (data,)
        parts.append((part.name, part.weighting, counts[0], counts[1]))
    forms = _forms(tensors)
    if forms is None:
        return batch
    found = {name: getattr(batch, name) for name in PROPERTIES}
    return Batch(batch.parts, Plain(BatchForm(tuple(parts), forms, found), tensors))


def _forms(tensors: list[Any]) -> tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...] | None:
    """Return the tensors' shapes, strides and dtypes; None unless the tensors have no other properties."""
    found = []
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
            or tensor.requires_grad
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_inference()
            or vars(tensor)
        ):
            return None
        found.append((tensor.shape, tensor.stride(), tensor.dtype))
    # a tensor that occurs twice is sent once
    return tuple(found) if len(set(map(id, tensors))) == len(tensors) else None
