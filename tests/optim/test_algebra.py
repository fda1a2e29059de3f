"""Sums over long vectors against plain torch, for numbers of any size."""

from __future__ import annotations

import math

import pytest
import torch

from batchopt.optim.algebra import BLOCK, dot, largest, norm, products

NAN, INF = math.nan, math.inf
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


@every_dtype
@pytest.mark.parametrize(
    "elements, expected",
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([-5.0, 3.0], 5.0),
        ([-5.0, 6.0], 6.0),
        ([NAN, 1.0], NAN),
        ([1.0, NAN], NAN),
        ([-INF, 1.0], INF),
        ([INF, NAN], NAN),
    ],
)
def test_the_largest_absolute_value(elements: list[float], expected: float, dtype: torch.dtype) -> None:
    found = largest(torch.tensor(elements, dtype=dtype))
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert math.copysign(1.0, found) == 1.0 or math.isnan(found)


@pytest.mark.parametrize("count", [4, 3 * BLOCK])
@pytest.mark.parametrize(
    "size, dtype",
    [(s, torch.float64) for s in (1e-300, 1e-15, 1.0, 1e15, 1e300)]
    + [(s, torch.float32) for s in (1e-37, 1e-15, 1.0, 1e15, 1e34)],
)
def test_no_length_is_lost_where_squares_are_no_numbers(size: float, dtype: torch.dtype, count: int) -> None:
    vector = torch.full((count,), size, dtype=dtype)
    assert norm(vector) == pytest.approx(float(vector[0]) * math.sqrt(count), rel=1e-4)


@pytest.mark.parametrize("count", [4, 3 * BLOCK])
@pytest.mark.parametrize("power", [-100, 100])
def test_no_product_is_lost_where_squares_of_elements_are_no_numbers(power: int, count: int) -> None:
    vector = torch.linspace(0.5, 1.0, count)
    far, rows = vector * 2.0**power, torch.stack((vector, vector.neg()))
    assert dot(far, far) == dot(vector, vector) * 4.0**power
    for one in (rows, rows * 2.0**power):
        expected = torch.stack([one[0].double() @ far.double(), one[1].double() @ far.double()])
        torch.testing.assert_close(products(one, far), expected, rtol=1e-5, atol=0.0)
    assert dot(far, torch.zeros(count)) == 0.0 and math.isnan(dot(far, torch.full((count,), NAN)))
