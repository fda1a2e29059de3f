"""Destinations of the rows that a function returns for the samples of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from batchopt_workers.data.batch import Part
from batchopt_workers.data.mapping import free_memory
from batchopt_workers.data.memory import GrowingFile, octets
from batchopt_workers.tasks.forms import Column, Form, objects_form, places, rows_form

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

    Its size need not be known in advance: it grows with what is written. Its pages are written by the kernel, once, and
    no writer maps them.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor."""
        self._file = GrowingFile(fd)

    def write(
        self, columns: Sequence[Column], tensors: Sequence[torch.Tensor], start: int, stop: int, samples: int
    ) -> None:
        """See `Output`. Raise `OSError` if files may not be as large."""
        offsets, _ = places(columns, samples)
        for tensor, offset in zip(tensors, offsets, strict=True):
            elements = octets(tensor).numpy().data
            _check_room(len(elements))
            self._file.write(elements, offset + start * (len(elements) // (stop - start)))


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
