"""The files that worker processes write the results of tasks to, as the parent reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from batchopt_workers.forms import Column, places
from batchopt_workers.layout import Layout
from batchopt_workers.memory import GrowingFile, SharedBlock
from batchopt_workers.rows import Rows
from batchopt_workers.shared_totals import SharedTotals

# Bytes up to which a result is copied, so that it holds no mapping.
_SMALL = 2**16


def read_columns(file: GrowingFile, columns: Sequence[Column], samples: int, copied: bool) -> list[torch.Tensor]:
    """The rows of so many samples that were written to the file, each column as a tensor of this process alone: the
    file's own pages, until they are written here, unless they are to be `copied`."""
    offsets, nbytes = places(columns, samples)
    file.lengthen(nbytes, sparse=True)
    block = SharedBlock(os.dup(file.fd), private=True)
    block.release()
    found = [
        block.tensor(column.dtype, (samples, *column.shape), offset)
        for column, offset in zip(columns, offsets, strict=True)
    ]
    return [tensor.clone() for tensor in found] if copied or nbytes <= _SMALL else found


class TotalsFile:
    """The rows that one worker sums totals in."""

    def __init__(self) -> None:
        self.file = GrowingFile()
        self._mapped = SharedTotals(os.dup(self.file.fd))

    def rows(self, layout: Layout, count: int) -> Rows:
        """So many rows of that layout, as the worker has them."""
        return self._mapped.rows(layout, count)
