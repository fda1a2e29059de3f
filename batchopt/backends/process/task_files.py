"""The files that worker processes write results to, as the parent reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import GrowingFile
from batchopt_workers.map.sums import Rows, SharedTotals, rows_nbytes
from batchopt_workers.tasks.forms import Column, places

# Largest result in bytes that is copied, so that it keeps no mapping.
_SMALL = 2**16
# Bytes for sums that each worker may keep in any case.
_KEPT = 2**25


def read_columns(file: GrowingFile, columns: Sequence[Column], samples: int, copied: bool) -> list[torch.Tensor]:
    """Return the rows of `samples` samples that were written to the file, each column as a private tensor: a
    copy if `copied`, else the file's own pages, which are copied when they are written."""
    offsets, nbytes = places(columns, samples)
    memory = file.private(nbytes)
    found = [_tensor(memory, c.dtype, (samples, *c.shape), offset) for c, offset in zip(columns, offsets, strict=True)]
    return [tensor.clone() for tensor in found] if copied or nbytes <= _SMALL else found


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
