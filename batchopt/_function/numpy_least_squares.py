"""The residuals of the loaded batch over NumPy vectors, for least-squares solvers outside of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from batchopt._function.function import BatchFunction
from batchopt._function.least_squares import (
    Roots,
    flat,
    jacobian,
    jacobian_product,
    residuals,
    square_roots,
    transposed_product,
)
from batchopt._function.numpy_types import Doubles

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class At(Protocol):
    """Evaluates at other parameters."""

    def __call__(self, x: Any, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `evaluate` with X set to `x`; X is put back."""


class FlatLeastSquares:
    """The residuals of f as functions of a flat vector `x`, each scaled with the root of twice its weight in f: f is
    half the sum of their squares, as `scipy.optimize.least_squares` counts. Under a robust loss, the roots of what they
    add to f, with their signs, in place of the residuals: so any method minimises f, with SciPy's `loss` left out.

    Vectors are NumPy arrays, float64, shape `(n,)` for `x` and `(N,)` for the residuals: in the order of the terms,
    then of the samples, then of the numbers of a sample. Everything else as in `FlatObjective`; raises what
    `BatchOptimizer.residuals` raises.
    """

    def __init__(self, function: BatchFunction, at: At) -> None:
        """`at` evaluates at another point."""
        self._function, self._at = function, at

    def fun(self, x: Any) -> Doubles:
        """The residuals at `x`."""
        return _array(self._at(x, lambda: torch.cat([roots.values for roots in self._roots().values()])))

    def jac(self, x: Any) -> Doubles:
        """Their Jacobian at `x`: shape `(N, n)`. All of it is in memory."""
        return _array(self._at(x, lambda: self._scaled(jacobian(self._function))))

    def operator(self, x: Any) -> LinearOperator:
        """Their Jacobian at `x` as what has products with vectors, each about two evaluations: for large problems
        (`jac=...` with `tr_solver="lsmr"`). Needs SciPy."""
        from scipy.sparse.linalg import LinearOperator

        point = np.array(x, dtype=np.float64)
        count = len(self.fun(point))

        def times(v: Any) -> Doubles:
            direction = torch.from_numpy(np.array(v, dtype=np.float64).reshape(-1))
            return _array(self._at(point, lambda: self._scaled(jacobian_product(self._function, direction))))

        def transposed(u: Any) -> Doubles:
            weights = torch.from_numpy(np.array(u, dtype=np.float64).reshape(-1))
            return _array(self._at(point, lambda: self._transposed(weights)))

        found: LinearOperator = LinearOperator((count, len(point)), matvec=times, rmatvec=transposed, dtype=np.float64)
        return found

    def _roots(self) -> dict[str | None, Roots]:
        return square_roots(self._function, _by_name(residuals(self._function, None, None)))

    def _scaled(self, found: Any) -> torch.Tensor:
        """Derivatives of the residuals, of all terms in one, with a row for each residual: (samples, d, ...) each."""
        parts = {name: flat(part).double() for name, part in _by_name(found).items()}
        roots = self._roots()
        return torch.cat(
            [
                part * (roots[name].slopes[:, None] if part.dim() > 1 else roots[name].slopes)
                for name, part in parts.items()
            ]
        )

    def _transposed(self, weights: torch.Tensor) -> torch.Tensor:
        found = _by_name(residuals(self._function, None, None))
        roots = square_roots(self._function, found)
        split = torch.split(weights, [len(one.slopes) for one in roots.values()])
        parts = dict(zip(found, split, strict=True))
        scaled = {name: _like(found[name], part * roots[name].slopes) for name, part in parts.items()}
        return transposed_product(self._function, scaled[None] if None in scaled else scaled)


def _by_name(found: Any) -> dict[str | None, Any]:
    return dict(found) if isinstance(found, Mapping) else {None: found}


def _like(found: Any, numbers: torch.Tensor) -> Any:
    """These numbers in the form of the residuals."""
    if isinstance(found, torch.Tensor):
        return numbers.view(found.shape)
    pieces = torch.split(numbers, [one.numel() for one in found])
    return [piece.view(one.shape) for piece, one in zip(pieces, found, strict=True)]


def _array(found: torch.Tensor) -> Doubles:
    array: Doubles = found.detach().to(torch.float64).numpy()
    return array
