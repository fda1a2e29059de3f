"""Sums and products of long vectors: on all cores, with bits that do not depend on the number of threads.

A vector is cut into blocks fixed by its length alone; each block is processed by one thread, and the results of the
blocks are summed in order, in float64. The threads are Python's: torch's own would spin for milliseconds after each
operation, on cores that the workers need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import TypeVar

import numpy as np
import torch

from batchopt._machine.cores import torch_threads

# Elements per block of a vector.
BLOCK = 2**16
# Total number of elements read from which starting threads saves time.
LARGE = 2**22
# Up to this many elements torch uses one thread in any case.
SMALL = 2**15

T = TypeVar("T")


def _blocks(length: int, function: Callable[[slice], T], elements: int) -> list[T]:
    """Return `function` of each block of a vector of `length`; `elements` are read in total."""
    return _each([slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)], function, elements)


def _each(slices: Sequence[slice], function: Callable[[slice], T], elements: int) -> list[T]:
    """Return `function` of each of `slices`, in order; `elements` are read in total."""
    threads = min(torch.get_num_threads(), len(slices)) if elements >= LARGE else 1
    with torch_threads(1):
        if threads == 1:
            return [function(part) for part in slices]
        found: list[list[T]] = [[] for _ in range(threads)]
        bounds = [i * len(slices) // threads for i in range(threads + 1)]

        def work(i: int) -> None:
            torch.set_num_threads(1)  # libraries called by torch have a setting per thread
            with torch.no_grad():  # the grad mode is per thread too
                found[i] = [function(part) for part in slices[bounds[i] : bounds[i + 1]]]

        helpers = [Thread(target=work, args=(i,)) for i in range(1, threads)]
        for helper in helpers:
            helper.start()
        work(0)
        for helper in helpers:
            helper.join()
    return [item for items in found for item in items]


def _one_thread(vector: torch.Tensor) -> AbstractContextManager[None]:
    """Have torch use one thread for a vector; set only where it would use more."""
    return _AS_IT_IS if vector.numel() < SMALL else torch_threads(1)


_AS_IT_IS = nullcontext()


def dot(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the dot product of two vectors (shape `(n,)` both); no product of elements under- or overflows."""
    found = _dot(one, other)
    least, most = _range(one.dtype)
    if least < abs(found) < most:
        return found
    sizes = largest(one), largest(other)
    if not all(0 < size < math.inf for size in sizes):
        return found
    first, second = map(power_of_two, sizes)
    return _dot(one / first, other / second) * first * second


def dots(*pairs: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Return the dot product of each pair of vectors of one dtype (shapes `(n,)`). A card is waited for each time that
    something is read, so from there they are read all at once."""
    if pairs[0][0].is_cpu:
        return [dot(one, other) for one, other in pairs]
    least, most = _range(pairs[0][0].dtype)
    found = torch.stack([torch.dot(one, other) for one, other in pairs]).tolist()
    return [
        value if least < abs(value) < most else dot(one, other)
        for value, (one, other) in zip(found, pairs, strict=True)
    ]


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_cpu or one.numel() <= BLOCK:
        return torch.dot(one, other).item()
    return math.fsum(_blocks(one.numel(), lambda part: torch.dot(one[part], other[part]).item(), 2 * one.numel()))


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Return bounds of a sum of products between which no product that matters has under- or overflowed."""
    return (1e-280, 1e290) if dtype is torch.float64 else (1e-30, 1e30)


def norm(vector: torch.Tensor) -> float:
    """Return the Euclidean length; no sum overflows if it is finite."""
    square = _dot(vector, vector)
    if 1e-20 < square < 1e30:  # no square of a relevant element under- or overflowed in single precision
        return math.sqrt(square)
    scale = largest(vector)
    if scale == 0 or not math.isfinite(scale):
        return scale
    scale = power_of_two(scale)
    scaled = vector / scale
    return scale * math.sqrt(_dot(scaled, scaled))


def power_of_two(number: float) -> float:
    """Return the largest one not above a positive number; dividing by it is exact."""
    return 2.0 ** (math.frexp(number)[1] - 1)


def absolute_sum(vector: torch.Tensor) -> float:
    """Return the sum of the absolute values."""
    if not vector.is_cpu or vector.numel() <= BLOCK:
        return vector.abs().sum().item()
    return math.fsum(_blocks(vector.numel(), lambda part: vector[part].abs().sum().item(), vector.numel()))


def largest(vector: torch.Tensor) -> float:
    """Return the largest absolute value; NaN if there is one, 0 for no elements."""
    if not vector.numel():
        return 0.0
    if not vector.is_cpu:
        return float(torch.linalg.vector_norm(vector, math.inf).item())
    if vector.numel() <= BLOCK:
        return _largest(vector)
    found = _blocks(vector.numel(), lambda part: _largest(vector[part]), vector.numel())
    return math.nan if any(map(math.isnan, found)) else max(found)


def _largest(vector: torch.Tensor) -> float:
    """Use NumPy if it has the dtype: 20 times as fast as torch's norm, and twice as fast as its `aminmax`."""
    if vector.dtype not in (torch.float32, torch.float64):
        low, high = (bound.item() for bound in torch.aminmax(vector))
    else:
        with np.errstate(all="ignore"):  # NaN is expected
            elements = vector.detach().numpy()
            low, high = float(elements.min()), float(elements.max())
    return max(-low, high) + 0.0  # turns -0 into 0


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the elements of `source` to `out` (same shape), rounded if necessary."""
    if not out.is_cpu or out.dim() != 1 or out.numel() < LARGE:
        with _one_thread(out):
            out.copy_(source)
    else:
        _blocks(out.numel(), lambda part: out[part].copy_(source[part]), 2 * out.numel())


def _within(vector: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
    """Return both with the same product, and a factor that the vector's dtype has: the step of a line search may be
    out of its range where the step times the direction is not."""
    limits = torch.finfo(vector.dtype)
    if factor == 0 or limits.tiny <= abs(factor) <= limits.max or not math.isfinite(factor):
        return vector, factor
    root = power_of_two(math.sqrt(abs(factor)))
    return vector * root, factor / root


def scaled(vector: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """Return `factor * vector`, in `out`."""
    vector, factor = _within(vector, factor)
    if not out.is_cpu or out.numel() < LARGE:
        with _one_thread(out):
            return torch.mul(vector, factor, out=out)
    _blocks(out.numel(), lambda part: torch.mul(vector[part], factor, out=out[part]), 2 * out.numel())
    return out


def add(one: torch.Tensor, other: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """Return `one + factor * other`, in `out`, which may be one of them."""
    other, factor = _within(other, factor)
    if not out.is_cpu or out.numel() < LARGE:
        with _one_thread(out):
            return torch.add(one, other, alpha=factor, out=out)
    _blocks(out.numel(), lambda part: torch.add(one[part], other[part], alpha=factor, out=out[part]), 3 * out.numel())
    return out


def products(rows: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Return the product of each row (shape `(k, n)`) with a vector (shape `(n,)`): float64, shape `(k,)`, on the CPU.
    The rows are read once, unless products of elements under- or overflowed."""
    found = _products(rows, vector)
    least, most = _range(rows.dtype)
    sizes = np.abs(found.numpy())
    for row in np.flatnonzero(~((sizes > least) & (sizes < most))).tolist():
        found[row] = dot(rows[row], vector)
    return found


def _products(rows: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    if not rows.is_cpu:
        return torch.mv(rows, vector).double().cpu()
    found = _blocks(vector.numel(), lambda part: torch.mv(rows[:, part], vector[part]).double(), rows.numel())
    return torch.stack(found).sum(0) if len(found) > 1 else found[0]


def products_among(rows: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Return the products of rows (shape `(k, n)`) with each other over these of their elements (indices): float64,
    shape `(k, k)`, on the CPU."""
    found = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    with torch_threads(1):
        for part in torch.split(elements, BLOCK // 16):
            some = rows[:, part].double()
            found += (some @ some.T).cpu()
    return found


def combination(weights: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add `weights @ rows` (shapes `(k,)`, `(k, n)`) to `out` (shape `(n,)`). The rows are read once."""
    sizes, limits = weights[weights != 0].abs(), torch.finfo(rows.dtype)
    if len(sizes) and not limits.tiny <= float(sizes.min()) <= float(sizes.max()) <= limits.max:  # see `_within`
        halves = torch.frexp(weights)[1] // 2
        weights, rows = torch.ldexp(weights, -halves), torch.ldexp(rows, halves.to(rows.device)[:, None])
    factors = weights.to(rows)
    if not rows.is_cpu:
        return out.addmv_(rows.T, factors)
    _blocks(out.numel(), lambda part: out[part].addmv_(rows[:, part].T, factors), rows.numel())
    return out


def _row_blocks(matrix: torch.Tensor, function: Callable[[slice], T], elements: int) -> list[T]:
    count = max(1, BLOCK // matrix.shape[1])
    return _each([slice(start, start + count) for start in range(0, len(matrix), count)], function, elements)


def multiply(matrix: torch.Tensor, vector: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `matrix @ vector` (shapes `(n, n)`, `(n,)`), in `out`."""
    if not matrix.is_cpu:
        return torch.mv(matrix, vector, out=out)
    _row_blocks(matrix, lambda part: torch.mv(matrix[part], vector, out=out[part]), matrix.numel())
    return out


def update(matrix: torch.Tensor, scale: float, left: torch.Tensor, right: torch.Tensor) -> None:
    """Set `matrix` (shape `(n, n)`) to `scale * matrix + left.T @ right` (shapes `(k, n)`), in place."""
    if not matrix.is_cpu:
        matrix.addmm_(left.T, right, beta=scale)
        return
    _row_blocks(matrix, lambda part: matrix[part].addmm_(left[:, part].T, right, beta=scale), 2 * matrix.numel())


def update_and_multiply(
    matrix: torch.Tensor,
    scale: float,
    left: torch.Tensor,
    right: torch.Tensor,
    vector: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """`update`, then `multiply`, reading the matrix once."""
    if not matrix.is_cpu:
        update(matrix, scale, left, right)
        return multiply(matrix, vector, out)

    def both(part: slice) -> None:
        rows = matrix[part]
        rows.addmm_(left[:, part].T, right, beta=scale)
        torch.mv(rows, vector, out=out[part])

    _row_blocks(matrix, both, 2 * matrix.numel())
    return out
