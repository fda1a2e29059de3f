"""Memory for the sums of totals that a worker shares with its parent, which does not know the size in advance."""

from __future__ import annotations

import os

import torch

from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import GrowingFile, SharedBlock
from batchopt_workers.map.sums import Rows, rows_nbytes


class SharedTotals:
    """Rows in a file that grows with the results; the process that made the file maps the reported rows."""

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor."""
        self._file = GrowingFile(fd)
        self._block: SharedBlock | None = None
        self._rows: Rows | None = None
        self._layout: Layout | None = None

    def rows(self, layout: Layout, count: int) -> Rows:
        """See `Totals`. Raise `MemoryError`."""
        if self._rows is not None and self._layout == layout and len(self._rows) >= count:
            return self._rows
        nbytes = rows_nbytes(layout, 0, count)
        if self._block is None or self._block.nbytes < nbytes:
            self._file.lengthen(nbytes)
            self._block = SharedBlock(os.dup(self._file.fd))
            self._block.release()
        self._rows, self._layout = Rows(layout, 0, count, self._block, torch.device("cpu")), layout
        return self._rows
