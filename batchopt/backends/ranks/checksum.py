"""Cheap digests of tensors and batches, by which ranks see whether they have the same, in the same order."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from batchopt_workers.data.batch import Batch
from batchopt_workers.data.items import Items
from batchopt_workers.data.memory import octets
from batchopt_workers.data.structures import tensors_in


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """CRC-32 of the elements, in their order, and of shapes and dtypes."""
    found = 0
    for tensor in tensors:
        tensor = tensor.detach()
        found = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), found)
        if tensor.layout is torch.strided and not tensor.is_quantized:
            found = zlib.crc32(octets(tensor.cpu().resolve_conj().resolve_neg()).numpy().data, found)
    return f"{found:08x}"


def of_batch(batch: Batch) -> str:
    """The number of samples, and a checksum of all tensors; of a dataset the name of its class."""
    tensors: list[torch.Tensor] = []
    names = []
    for part in batch.parts:
        tensors += part.criterion_rows.values()
        for data in (part.inputs, part.targets):
            if isinstance(data, Items):
                names.append(type(data.data).__name__)
            elif data is not None:
                tensors += tensors_in(data.data)
    return f"of {batch.size} samples ({' '.join([*names, checksum(tensors)])})"
