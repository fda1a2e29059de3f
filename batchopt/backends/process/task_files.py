"""The files that worker processes write results to, as the parent reads them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from batchopt_workers.evaluate.sums import Rows, SharedTotals, rows_nbytes
from batchopt_workers.functions.forms import Column, places
from batchopt_workers.wire import mapping
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.memory import GrowingFile, octets

# Largest result in bytes that is read, so that it keeps no mapping.
_SMALL = 2**20
# Bytes for sums that each worker may keep in any case.
_KEPT = 2**25
# Largest result file in bytes that is reused.
_AGAIN = 2**26


class ResultFile:
    """The file in which workers put the rows of one result after another: memory that is there already is written
    several times faster than new memory."""

    def __init__(self) -> None:
        self.file = GrowingFile()
        self._seen: weakref.ref[npt.NDArray[np.uint8]] | None = None  # the memory of the result read last
        self._forks = -1  # before that; -1: no result was read from it since the last one began

    def begin(self) -> None:
        """Begin a result: until it was read, nobody knows who may be writing."""
        self._forks = -1

    def read(self, columns: Sequence[Column], samples: int, in_use: bool) -> list[torch.Tensor]:
        """Return the rows of `samples` samples, each column as a private tensor: a small one as a copy, a large one as
        the file's own pages, which are copied when they are written. `in_use`: a worker may still be writing; then all
        are copies."""
        offsets, nbytes = places(columns, samples)
        self._seen = None
        if in_use or nbytes <= _SMALL:  # reading takes a fraction of the time in which pages are mapped
            self.file.lengthen(nbytes, sparse=True)
            found = [torch.empty((samples, *c.shape), dtype=c.dtype, device="cpu") for c in columns]
            for tensor, offset in zip(found, offsets, strict=True):
                self.file.read(octets(tensor).numpy().data, offset)
        else:
            memory = self.file.private(nbytes)
            self._seen = weakref.ref(memory)
            found = [_tensor(memory, c.dtype, (samples, *c.shape), at) for c, at in zip(columns, offsets, strict=True)]
        if not in_use:
            self._forks = mapping.forks()
        return found

    def leave_unwritten(self) -> None:
        """End a result of which nothing was written."""
        self._forks = mapping.forks()

    @property
    def was_read(self) -> bool:
        """Tell whether the result that was begun last was read, when no worker was late."""
        return self._forks >= 0

    @property
    def is_free(self) -> bool:
        """Tell whether it can be written again: no tensor here shows its pages, nor one in a process forked since."""
        unseen = self._seen is None or self._seen() is None
        return unseen and self._forks == mapping.forks() and not self.is_too_large

    @property
    def is_too_large(self) -> bool:
        """Tell whether it takes so much memory that it is not kept."""
        return os.fstat(self.file.fd).st_size > _AGAIN


def _tensor(memory: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


class TotalsFile:
    """The rows in which one worker sums totals; they are kept for the next total."""

    def __init__(self) -> None:
        self.file = GrowingFile()
        self._mapped = SharedTotals(os.dup(self.file.fd))
        self._used = 0  # bytes, in the last total

    def rows(self, layout: Layout, count: int) -> Rows:
        """Return the worker's rows, `count` of this layout."""
        self._used = rows_nbytes(layout, 0, count)
        return self._mapped.rows(layout, count)

    @property
    def is_too_large(self) -> bool:
        """Tell whether the last total used so little of it that a smaller one should replace it."""
        return os.fstat(self.file.fd).st_size > max(_KEPT, 8 * self._used)
