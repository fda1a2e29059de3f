"""A small training that the tests of this folder run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchopt import Batches, BatchOptimizer


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Fifty samples."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(50, 3, generator=generator).double(), torch.randn(50, 1, generator=generator).double()


def optimizer(parallelize: int = 1, **options: Any) -> BatchOptimizer:
    """Over a module that draws random numbers, in chunks that fix the bits."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1)).double()
    given = {"optimizer": "adam", "parallelize": parallelize, "chunk_size": 4, **options}
    return BatchOptimizer(module, nn.MSELoss(), **given)


def batches() -> Batches:
    """Five an epoch, shuffled."""
    return Batches(data(), 10, shuffle=True, seed=3)


class Killed(Exception):
    """In place of the end of the process."""
