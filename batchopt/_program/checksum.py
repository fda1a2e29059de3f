"""A short checksum of tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from batchopt_workers.wire.memory import octets


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return the CRC-32 of the elements, in their order, and of shapes and dtypes."""
    found = 0
    for tensor in tensors:
        tensor = tensor.detach()
        found = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), found)
        if tensor.layout is torch.strided and not tensor.is_quantized:
            found = zlib.crc32(octets(tensor.cpu().resolve_conj().resolve_neg()).numpy().data, found)
    return f"{found:08x}"
