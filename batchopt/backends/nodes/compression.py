"""Compressed gradients: pure functions of tensors.

The contribution of each of several processes to df/dX is rounded to fewer bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from batchopt_workers.wire.structures import all_finite


class DoesNotFit(ValueError):
    """A finite gradient of these samples is too large for the format."""

    def __init__(self, what: str, samples: range = range(0)) -> None:
        super().__init__(what)
        self.samples = samples


@dataclass(frozen=True)
class Compression(ABC):
    """A format for gradients."""

    # Whether the rounding error is added to the next gradient.
    keeps_residual: ClassVar[bool] = False

    @abstractmethod
    def encode(self, vector: torch.Tensor, members: int) -> torch.Tensor:
        """Round a finite vector (shape `(n,)`), the contribution of one of `members` processes to a gradient. Raise
        `DoesNotFit`."""

    @abstractmethod
    def decode(self, code: torch.Tensor, members: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rounded vector: shape `(size,)`."""


@dataclass(frozen=True)
class Rounded(Compression):
    """Another floating-point format, rounded to nearest."""

    dtype: torch.dtype

    def encode(self, vector: torch.Tensor, members: int) -> torch.Tensor:
        code = vector.to(self.dtype)
        if not all_finite(code):
            name, largest = _NAMES[self.dtype], torch.finfo(self.dtype).max
            other = "; use compress='bf16', or a smaller loss" if name == "fp16" else ""
            raise DoesNotFit(
                f"a gradient of {vector.abs().max().item():.3g} does not fit in {name}, which ends at {largest:.5g}"
                f"{other}:"
            )
        return code

    def decode(self, code: torch.Tensor, members: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return code.to(dtype, copy=True)


@dataclass(frozen=True)
class TwoBit(Compression):
    """Three levels: `threshold / members`, its negative, and 0. So the sum over all members lies between `-threshold`
    and `threshold`. The rounding error is added to the next gradient.

    The code has, for all elements, a bit that marks the positive level, and then a bit that marks the negative one.
    """

    threshold: float

    keeps_residual = True

    def encode(self, vector: torch.Tensor, members: int) -> torch.Tensor:
        numbers, level = vector.numpy(), self.threshold / members
        return torch.from_numpy(np.concatenate([np.packbits(numbers >= level), np.packbits(numbers <= -level)]))

    def decode(self, code: torch.Tensor, members: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        above, below = np.unpackbits(code.numpy().reshape(2, -1), axis=1, count=size).view(np.int8)
        return torch.from_numpy(above - below).to(dtype).mul_(self.threshold / members)


class Compressed(NamedTuple):
    """The code of a gradient, and its rounding error, if that is kept."""

    code: torch.Tensor
    residual: torch.Tensor | None


def compress(
    compression: Compression, gradient: torch.Tensor, residual: torch.Tensor | None, members: int
) -> Compressed | None:
    """Compress the contribution of one of `members` processes to df/dX, together with the `residual` of its earlier
    gradients; return None if it is not finite, which must be seen uncompressed. Raise `DoesNotFit`."""
    whole = gradient if residual is None else residual + gradient
    if not all_finite(whole):
        return None
    code = compression.encode(whole, members)
    if not compression.keeps_residual:
        return Compressed(code, None)
    value = compression.decode(code, members, len(whole), whole.dtype)
    return Compressed(code, torch.sub(whole, value, out=value))


# ---- the argument

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_THRESHOLD = 0.5
_NEEDED = "`compress` must be None, 'fp16', 'bf16', '2bit', or a dict as {'type': '2bit', 'threshold': 0.5}"


def read_compress(value: Any) -> Compression | None:
    """Return the compression of gradients; None is no compression. Raise `TypeError` or `ValueError`."""
    if value is None:
        return None
    if not isinstance(value, (str, Mapping)):
        raise TypeError(f"{_NEEDED}; got {type(value).__name__} {value!r}")
    given: dict[Any, Any] = {"type": value} if isinstance(value, str) else dict(value)
    kind = given.pop("type", None)
    if kind not in (*_DTYPES, "2bit"):
        raise ValueError(f"{_NEEDED}; got {value!r}")
    allowed = ("threshold",) if kind == "2bit" else ()
    if unknown := [name for name in given if name not in allowed]:
        raise ValueError(f"`compress` has unknown {unknown}: beside 'type', {kind!r} has {[*allowed]}; got {value!r}")
    return TwoBit(_read_threshold(given)) if kind == "2bit" else Rounded(_DTYPES[kind])


def _read_threshold(given: Mapping[Any, Any]) -> float:
    threshold = given.get("threshold", _THRESHOLD)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"`compress` has threshold {threshold!r}: it must be a number > 0")
    if not 0 < threshold < math.inf:
        raise ValueError(
            f"`compress` has threshold {threshold!r}: it must be finite and > 0, about as large as the larger elements "
            "of df/dX"
        )
    return float(threshold)
