"""Whether a gradient is finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt import BatchOptimizer, NonFiniteError
from batchopt._mapreduce.reduce import all_finite

BAD = [math.nan, math.inf, -math.inf]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])


@DTYPES
def test_finite_numbers_are_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.zeros(3, dtype=dtype))
    assert all_finite(torch.tensor([-1.0, 2.0, -3.0], dtype=dtype))
    assert all_finite(torch.zeros(0, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_that_overflows_has_finite_terms(dtype: torch.dtype, sign: float) -> None:
    gradient = torch.full((1000,), sign * torch.finfo(dtype).max, dtype=dtype)
    assert math.isinf(gradient.sum().item())
    assert all_finite(gradient)


@DTYPES
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_number_among_those_that_overflow_is_seen(dtype: torch.dtype, bad: float) -> None:
    gradient = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    gradient[500] = bad
    assert not all_finite(gradient)


@given(st.lists(st.floats(width=32), max_size=50))
@settings(deadline=None)
def test_a_gradient_is_finite_if_each_of_its_numbers_is(numbers: list[float]) -> None:
    assert all_finite(torch.tensor(numbers, dtype=torch.float32)) == all(map(math.isfinite, numbers))


@pytest.mark.parametrize("options", [{"chunk_size": 20}, {"parallelize": 2, "chunk_size": 20}])
@pytest.mark.parametrize("ignored", [0, 40])
def test_a_mean_over_nothing_in_one_chunk_says_what_to_do(ignored: int, options: dict[str, Any]) -> None:
    x, y = torch.randn(80, 3), torch.randint(0, 4, (80,))
    y[ignored : ignored + 20] = -1

    def loss_fn(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(module(x)[y != -1], y[y != -1])

    given: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": None, "check_cut": False, **options}
    with BatchOptimizer(torch.nn.Linear(3, 4), **given) as opt:
        opt.load(x, y)
        with pytest.raises(NonFiniteError, match=rf"mean over nothing.*`denominators`.*\(sample {ignored}\)"):
            opt.evaluate()
        y[ignored + 1] = 0
        x[ignored + 1] = math.nan
        opt.load(x, y)
        with pytest.raises(NonFiniteError) as caught:
            opt.evaluate()
        assert "denominators" not in str(caught.value)
