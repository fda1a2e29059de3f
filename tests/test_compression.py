"""The formats of compressed gradients: values worked out by hand, and bounds."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from batchopt.backends.nodes.compression import Compression, DoesNotFit, Rounded, TwoBit, compress, read_compress

HALF = Rounded(torch.float16)
BRAIN = Rounded(torch.bfloat16)


def sent(compression: Compression, gradient: torch.Tensor, residual: Any = None, members: int = 1) -> tuple[Any, Any]:
    """The gradient as it arrives, and what is left of it."""
    found = compress(compression, gradient, residual, members)
    assert found is not None
    return compression.decode(found.code, members, len(gradient), gradient.dtype), found.residual


# ---- two bits


def test_two_bits_of_three_rounds() -> None:
    gradient = torch.tensor([0.25, 0.5, 0.75, -0.5, -0.25, 2.0])
    rounds = [
        ([0.0, 0.5, 0.5, -0.5, 0.0, 0.5], [0.25, 0.0, 0.25, 0.0, -0.25, 1.5]),
        ([0.5, 0.5, 0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.5, 0.0, 0.0, 3.0]),
        ([0.0, 0.5, 0.5, -0.5, 0.0, 0.5], [0.25, 0.0, 0.75, 0.0, -0.25, 4.5]),
    ]
    residual = None
    for value, left in rounds:
        found, residual = sent(TwoBit(0.5), gradient, residual)
        assert found.tolist() == value and residual.tolist() == left


def test_the_level_is_the_share_of_a_member() -> None:
    value, residual = sent(TwoBit(0.5), torch.tensor([0.1, 0.125, -0.25]), members=4)
    assert value.tolist() == [0.0, 0.125, -0.125]
    assert residual.tolist() == [pytest.approx(0.1), 0.0, -0.125]


# ---- fewer bits


def test_rounded_by_hand() -> None:
    gradient = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-10, 65504.0, 2**-25, 1 + 2**-7], dtype=torch.float64)
    assert sent(HALF, gradient)[0].tolist() == [1.0, 1.0, 1 + 2**-10, 65504.0, 0.0, 1 + 2**-7]
    assert sent(BRAIN, gradient)[0].tolist() == [1.0, 1.0, 1.0, 65536.0, 2**-25, 1 + 2**-7]


def test_what_does_not_fit_is_an_error() -> None:
    text = "a gradient of 1e+06 does not fit in fp16, which ends at 65504; use compress='bf16', or a smaller loss:"
    with pytest.raises(DoesNotFit, match=re.escape(text)):
        compress(HALF, torch.tensor([1.0, -1e6]), None, 2)
    assert sent(BRAIN, torch.tensor([2.0**20]))[0].item() == 2.0**20
    with pytest.raises(DoesNotFit, match=r"a gradient of 1e\+300 does not fit in bf16, which ends at 3.3895e\+38:"):
        compress(BRAIN, torch.tensor([1e300], dtype=torch.float64), None, 2)


@pytest.mark.parametrize("compression", [HALF, BRAIN, TwoBit(0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_as_it_is(compression: Compression, bad: float) -> None:
    assert compress(compression, torch.tensor([1.0, bad]), None, 2) is None


# ---- the argument


def test_forms_of_the_argument() -> None:
    assert [read_compress(value) for value in (None, "fp16", "bf16", "2bit")] == [None, HALF, BRAIN, TwoBit(0.5)]
    assert read_compress({"type": "2bit", "threshold": 2}) == TwoBit(2.0)
