"""The numbers in shared memory through which an evaluation is repeated without a message: the parent writes which one,
and rings; each worker writes what it found, and then that number."""

from __future__ import annotations

import torch

from batchopt_workers.memory import SharedBlock

# Numbers of 8 bytes in a page: the first one is the parent's, the others are one for each worker.
PAGE = 512
# In a worker's page: the number it is done with, whether that was by the book, whether it takes part, the order's
# first and last chunk and step, when it began, how long it took; then the losses, of each term and partial.
DONE, ODD, ACTIVE, FIRST, LAST, STEP, BEGAN, SECONDS, LOSSES = range(9)


class Board:
    """The pages of `workers` workers in shared memory, as arrays of NumPy."""

    def __init__(self, block: SharedBlock, workers: int) -> None:
        self.block, self.workers = block, workers
        whole = block.tensor(torch.int64, (workers + 1, PAGE)).numpy()
        floats = block.tensor(torch.float64, (workers + 1, PAGE)).numpy()
        self.head = whole[0, :3]  # the number of the evaluation; the last one that was given up; which batch
        self.done, self.odd, self.active = (whole[1:, i] for i in (DONE, ODD, ACTIVE))
        self.orders = whole[1:, FIRST : STEP + 1]
        self.times = floats[1:, BEGAN : SECONDS + 1]
        self.losses = floats[1:, LOSSES:]

    @classmethod
    def create(cls, workers: int) -> Board:
        """A new one."""
        return cls(SharedBlock.create(8 * PAGE * (workers + 1)), workers)
