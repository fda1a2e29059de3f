"""Layers whose gradient counts how often an entry occurs in a forward: they cannot be cut."""

from __future__ import annotations

import torch

from batchopt_workers.batch.batch import Batch, Columns
from batchopt_workers.functions.inspection import counts_frequencies, name_of


def refuse_frequencies(
    module: torch.nn.Module, workers: int | None, batch: Batch | None = None, chunks: int = 1
) -> None:
    """Raise `ValueError` for a layer whose gradient counts how often an entry occurs in a forward, if the batch takes
    several forwards."""
    forwards = chunks
    if batch is not None and not batch.is_of_columns:
        listed = [not isinstance(part.inputs, Columns) and part.collate is None for part in batch.parts]
        uncut = sum(part.size if one_each else 1 for part, one_each in zip(batch.parts, listed, strict=True))
        forwards = max(chunks, uncut - len(batch.parts) + 1)
    part = None if workers == 1 and forwards == 1 else counts_frequencies(module)
    if part is not None:
        raise ValueError(
            f"'{name_of(part, module)}' ({type(part).__name__}) has scale_grad_by_freq: it divides gradients by how "
            "often an entry is in a forward, which has a chunk of the batch; use parallelize=1 without chunk_size "
            "(and with collate_fn for a list of samples), or scale_grad_by_freq=False"
        )
