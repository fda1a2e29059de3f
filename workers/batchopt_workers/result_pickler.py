"""Pickling what a function of the user returned: tensors among the objects as their bytes, in a hundredth of the time
that torch's own way takes for small ones."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch

from batchopt_workers.memory import octets


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle's class is untyped
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return _tensor, (bytearray(octets(obj).numpy()), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is its elements and nothing else, and alone in its memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(shape)


def dumps(result: Any) -> bytes:
    """The pickled result. Raises `TypeError` for an object that cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    except Exception as error:  # whatever the user's classes raise
        raise TypeError(
            f"the function returned an object that cannot be sent ({type(error).__name__}: {error}): return tensors, "
            "numbers and text"
        ) from error
    return file.getvalue()
