"""The result of a function for a chunk: its tensors, the structure that contains them, and the place of its rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from batchopt_workers.batch.batch import Part
from batchopt_workers.wire.layout import Layout, Slot
from batchopt_workers.wire.mapping import free_memory
from batchopt_workers.wire.memory import GrowingFile, aligned, octets
from batchopt_workers.wire.structures import items_of, map_tensors

# Integers up to here are exact in double precision.
LARGEST_INTEGER = 2**53


@dataclass(frozen=True)
class _Place:
    """A placeholder for the tensor of that index."""

    index: int


@dataclass(frozen=True)
class Column:
    """A tensor of the result, by its path there: `shape` is that of one sample's row or, in a total, of the tensor."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"`result{self.path}` {tuple(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Form:
    """The result of a chunk without its tensors. `objects`: one entry per sample, if the result is a list of them. A
    list of n tensors with n rows each, for n samples, can be read both ways, until other chunks show which is meant."""

    columns: tuple[Column, ...]
    skeleton: Any
    objects: list[Any] | None = None

    def is_as(self, before: Form | None) -> bool:
        """Tell whether `before`, that of a previous chunk, says the same."""
        return before is not None and self.objects is before.objects is None and self.columns == before.columns

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the structure with these tensors in their places."""
        return map_tensors(lambda place: tensors[place.index], self.skeleton, _is_place)


def _is_place(item: Any) -> bool:
    return isinstance(item, _Place)


def _is_array(item: Any) -> bool:
    return isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype.kind in "biufc")


def _leaves(path: str, data: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything but containers and None, with its path."""
    if _is_array(data):
        yield path, data
        return
    found = False
    for key, item in items_of(data):
        found = True
        yield from _leaves(f"{path}[{key!r}]", item)
    if not found and data is not None and not isinstance(data, (tuple, list, dict)):
        yield path, data


def _tensor(path: str, leaf: Any) -> torch.Tensor:
    """Return it as plain numbers on the CPU, without its graph. Raise `TypeError` if it is not a dense tensor."""
    if isinstance(leaf, np.ndarray) and _is_array(leaf):
        leaf = torch.from_numpy(np.ascontiguousarray(leaf).reshape(leaf.shape))
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"the function returned {type(leaf).__name__} as `result{path}`: return a tensor, or a tuple, list or dict "
            "of tensors"
        )
    if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_quantized:
        raise TypeError(f"the function returned `result{path}`, which is no dense tensor: call .to_dense() on it")
    return leaf.detach().cpu().resolve_conj().resolve_neg()


def _stripped(result: Any, is_leaf: Any) -> Any:
    count = iter(range(2**62))
    return map_tensors(lambda _: _Place(next(count)), result, is_leaf)


def _free(item: Any) -> Any:
    """Return the object of a sample, detached from all memory of the worker."""
    return map_tensors(lambda tensor: tensor.detach().cpu().clone(), item)


def objects_form(objects: Sequence[Any]) -> Form:
    """Return the form of a chunk with one object per sample."""
    return Form((), None, [_free(item) for item in objects])


def rows_form(result: Any, samples: int) -> tuple[Form, list[torch.Tensor]]:
    """Return the form of a chunk of `samples` samples, and its tensors, whose first dimension is the sample.

    Raise `TypeError` or `ValueError` for a result without a row for each sample.
    """
    is_list = type(result) is list
    fits_objects = is_list and len(result) == samples
    leaves = list(_leaves("", result))
    fits_rows = bool(leaves) and all(_has_rows(leaf, samples) for _, leaf in leaves)
    if not fits_rows and fits_objects:
        return objects_form(result), []
    if not fits_rows:
        raise _unfit(result, leaves, samples)
    tensors = [_tensor(path, leaf) for path, leaf in leaves]
    columns = tuple(Column(path, t.dtype, tuple(t.shape[1:])) for (path, _), t in zip(leaves, tensors, strict=True))
    objects = objects_form(result).objects if fits_objects else None
    return Form(columns, _stripped(result, _is_array), objects), tensors


def _has_rows(leaf: Any, samples: int) -> bool:
    is_nested = isinstance(leaf, torch.Tensor) and leaf.is_nested  # has no shape
    return _is_array(leaf) and not is_nested and len(leaf.shape) > 0 and leaf.shape[0] == samples


def _unfit(result: Any, leaves: list[tuple[str, Any]], samples: int) -> Exception:
    path, leaf = next(((path, leaf) for path, leaf in leaves if not _has_rows(leaf, samples)), ("", result))
    _tensor(path, leaf)  # raises for what is no tensor
    return ValueError(
        f"the function returned `result{path}` of shape {tuple(leaf.shape)} for {samples} samples: the first dimension "
        "has to be the samples; else return a list with one object a sample, or use total() for what is summed over "
        "the samples"
    )


def _of_number(number: complex) -> torch.Tensor:
    double = {float: torch.float64, complex: torch.complex128}
    return torch.as_tensor(number, dtype=double.get(type(number)))


def sums_form(result: Any) -> tuple[Form, list[torch.Tensor]]:
    """Return the form of a result that is summed over chunks, and its tensors; Python's numbers become 0-dim tensors.

    Raise `TypeError` or `ValueError` for what cannot be summed.
    """
    if type(result) is torch.Tensor:
        tensor = _tensor("", result)
        return Form((Column("", tensor.dtype, tuple(tensor.shape)),), _Place(0)), [tensor]
    found = map_tensors(_of_number, result, lambda item: isinstance(item, (bool, int, float, complex)))
    leaves = list(_leaves("", found))
    if not leaves:
        raise TypeError(f"the function returned {type(result).__name__} without a tensor: there is nothing to sum")
    tensors = [_tensor(path, leaf) for path, leaf in leaves]
    columns = tuple(Column(path, t.dtype, tuple(t.shape)) for (path, _), t in zip(leaves, tensors, strict=True))
    return Form(columns, _stripped(found, _is_array)), tensors


def places(columns: Sequence[Column], samples: int) -> tuple[list[int], int]:
    """Return the byte at which each column begins if the rows of `samples` samples are stored one column after the
    other, and the total number of bytes."""
    offsets, nbytes = [], 0
    for column in columns:
        offsets.append(nbytes)
        nbytes = aligned(nbytes + samples * torch.Size(column.shape).numel() * column.dtype.itemsize)
    return offsets, nbytes


def sums_layout(columns: Sequence[Column]) -> Layout:
    """Return the place of each tensor of a total in a row. All have one precision: double, unless all are of single
    precision or less. A complex tensor has two numbers per element."""
    dtypes = {column.dtype for column in columns}
    small = dtypes <= {torch.float32, torch.float16, torch.bfloat16, torch.complex64}
    slots, offset = [], 0
    for column in columns:
        shape = (*column.shape, 2) if column.dtype.is_complex else column.shape
        slots.append(Slot(column.path, shape, offset))
        offset += slots[-1].numel
    return Layout(tuple(slots), torch.float32 if small else torch.float64)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return its elements as real numbers, two per complex one. Raise `ValueError` for integers that a sum in double
    precision cannot represent."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.int64 and tensor.numel() and int(tensor.abs().max()) > LARGEST_INTEGER:
        raise ValueError(f"the function returned integers above 2**53, which are not summed exactly: {tensor.dtype}")
    return tensor


def summed(column: Column, view: torch.Tensor) -> torch.Tensor:
    """Return the sum in `view`, with the slot's shape, as a tensor of the column's own kind: integers for booleans,
    which are counted, and single precision for half. Raise `ValueError` for inexact integers."""
    if column.dtype.is_complex:
        return torch.view_as_complex(view.clone()).to(column.dtype)
    if column.dtype.is_floating_point:
        return view.to(torch.promote_types(column.dtype, torch.float32))
    if view.numel() and float(view.abs().max()) > LARGEST_INTEGER:
        raise ValueError(f"the sum of {column} is above 2**53, and not exact: return it in floating point")
    return view.to(torch.int64)


# Bytes from which free memory is checked.
_LARGE = 2**20


class Output(Protocol):
    """Takes the rows of samples `start` up to `stop` of `samples` in all: a tensor for each of the columns."""

    def write(
        self, columns: Sequence[Column], tensors: Sequence[torch.Tensor], start: int, stop: int, samples: int
    ) -> None:
        """Write them to their places. Raise `MemoryError`."""


class FileOutput:
    """A file of memory that several processes write to, each at the places of its samples; its creator reads it.

    Its size need not be known in advance: it grows with what is written. New pages are written by the kernel, once, one
    writer at a time; those that were there when the result was begun are mapped.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor."""
        self._file = GrowingFile(fd)
        self._mapped = torch.empty(0, dtype=torch.uint8, device="cpu")

    def begun(self) -> FileOutput:
        """Return this file, in which another result is begun."""
        if os.fstat(self._file.fd).st_size > len(self._mapped):
            self._mapped = self._file.shared()
        return self

    def write(
        self, columns: Sequence[Column], tensors: Sequence[torch.Tensor], start: int, stop: int, samples: int
    ) -> None:
        """See `Output`. Raise `OSError` if files may not be as large."""
        offsets, _ = places(columns, samples)
        for tensor, offset in zip(tensors, offsets, strict=True):
            elements = octets(tensor)
            first = offset + start * (len(elements) // (stop - start))
            place = self._mapped[first : first + len(elements)]
            if len(place) == len(elements):
                place.copy_(elements)
                continue
            _check_room(len(elements))
            self._file.write(elements.numpy().data, first)


def _check_room(nbytes: int) -> None:
    free = free_memory() if nbytes >= _LARGE else None
    if free is not None and nbytes > free:  # the kernel would take what is free, then kill a process for the rest
        raise MemoryError(
            f"{nbytes / 1e6:.1f} MB are needed for what the function returned, and {free / 1e6:.1f} MB are free: "
            "return less (transform=...), or go through the data in batches"
        )


class MemoryOutput:
    """Tensors of this process."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def write(
        self, columns: Sequence[Column], tensors: Sequence[torch.Tensor], start: int, stop: int, samples: int
    ) -> None:
        """See `Output`."""
        shapes = [(samples, *column.shape) for column in columns]
        if [tuple(tensor.shape) for tensor in self.tensors] != shapes:
            self.tensors = [
                torch.empty(shape, dtype=column.dtype, device="cpu")
                for shape, column in zip(shapes, columns, strict=True)
            ]
        for whole, tensor in zip(self.tensors, tensors, strict=True):
            whole[start:stop].copy_(tensor)


def write_results(output: Output, results: Sequence[Any], part: Part, samples: range) -> Form:
    """Write the results for the pieces of a chunk, `samples` of a part, and return their form.

    Raise `TypeError` or `ValueError` for a result without a row for each sample.
    """
    if part.one_by_one:
        return objects_form(results)
    (result,) = results
    form, tensors = rows_form(result, len(samples))
    if tensors:
        output.write(form.columns, tensors, samples.start, samples.stop, part.size)
    return form
