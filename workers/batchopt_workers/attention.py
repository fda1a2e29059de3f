"""Attention whose backward has a derivative."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel


def differentiable_twice() -> AbstractContextManager[Any]:
    """In the body, `scaled_dot_product_attention` is made of plain operations: the backward of its fused kernels cannot
    be differentiated, which products with a Hessian or a Jacobian need."""
    return sdpa_kernel(SDPBackend.MATH)
