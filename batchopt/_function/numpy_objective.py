"""f of the loaded batch over NumPy vectors, for solvers outside of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
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
from batchopt._machine.ownership import exclusive
from batchopt.errors import BatchoptError
from batchopt_workers.data.batch import Batch
from batchopt_workers.process.torch_settings import autocast_in_force


class _Point(NamedTuple):
    """f and df/dX at `x`, of a batch, under such settings of torch."""

    batch: weakref.ref[Batch]
    settings: tuple[object, ...]
    x: torch.Tensor
    loss: float
    gradient: Doubles


class FlatObjective:
    """f of a flat vector `x`, its gradient and its Hessian, on the workers of a `BatchOptimizer`.

    Vectors are NumPy arrays, float64, shape `(n,)`, in the order of `parameters`; as `x` and `v` anything will do that
    makes one of real numbers. A call leaves the module's parameters as they were, also when it raises; only `assign`
    changes them. The last point is remembered, so that the value and then the gradient of one `x` are one evaluation.
    f is that of the batch that is loaded when it is called, for as long as that one is: the same draws, one step.

    Where `x` has NaN or infinity, as some solvers try, f, gradient and products are NaN; where f is not finite, they
    are what f and they are: whatever `on_nonfinite` says, an answer that a solver can go back from. All calls raise
    `TypeError` or `ValueError` for what is no vector of real numbers of that length, for numbers that X's dtype has
    not, and what `BatchOptimizer.evaluate` raises beside that. `assign` takes finite numbers only.
    """

    def __init__(self, function: BatchFunction, evaluate: Callable[[], torch.Tensor]) -> None:
        """`evaluate` the function of the loaded batch by this."""
        self._function, self._owner, self._evaluate = function, function.owner, evaluate
        self._last: _Point | None = None

    @property
    def x0(self) -> Doubles:
        """The module's parameters as they are now: a new array."""
        return _doubles(self._function.parameters)

    @exclusive
    def __call__(self, x: Any) -> float:
        """f at `x`."""
        return self._at(x).loss

    @exclusive
    def gradient(self, x: Any) -> Doubles:
        """df/dX at `x`: a new array."""
        return self._at(x).gradient.copy()

    @exclusive
    def value_and_grad(self, x: Any) -> tuple[float, Doubles]:
        """f and df/dX at `x`."""
        point = self._at(x)
        return point.loss, point.gradient.copy()

    @exclusive
    def hvp(self, x: Any, v: Any) -> Doubles:
        """The Hessian at `x` times `v`: a new array; NaN where `v` is not finite, as some solvers try."""
        self._function.ready()
        vector, direction = self._read("x", x, finite=False), self._read("v", v, finite=False)
        if not bool(vector.isfinite().all()):
            return np.full(len(vector), np.nan)
        with self._function.as_it_is():
            return _doubles(self._there(vector, self._function.hvp, direction))

    def least_squares(self) -> FlatLeastSquares:
        """The residuals and their Jacobian, where f is a sum of squares: for `scipy.optimize.least_squares`."""
        return FlatLeastSquares(self._function, self._residuals_at)

    @exclusive
    def _residuals_at(self, x: Any, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._function.ready()
        return self._there(self._read("x", x), evaluate)

    @exclusive
    def assign(self, x: Any) -> None:
        """Make `x` the module's parameters."""
        self._function.parameters.copy_(self._read("x", x))
        self._function.subject.written()

    def __reduce__(self) -> NoReturn:
        raise BatchoptError(  # a `TypeError` would be taken for one of the function
            "this evaluates on the workers of a BatchOptimizer and cannot be copied, or sent to processes of a "
            "solver: have the solver call it in this process (differential_evolution(..., workers=1)); each call is "
            "parallel already"
        )

    def _at(self, x: Any) -> _Point:
        batch, vector = self._function.ready().batch, self._read("x", x, finite=False)
        settings = torch.get_default_dtype(), torch.get_float32_matmul_precision(), autocast_in_force()
        last = self._last
        if not bool(vector.isfinite().all()):
            return _Point(weakref.ref(batch), settings, vector, np.nan, np.full(len(vector), np.nan))
        if last is None or last.batch() is not batch or last.settings != settings or not torch.equal(last.x, vector):
            self._last = None
            with self._function.as_it_is():
                loss = self._there(vector, self._evaluate).item()
            gradient = _doubles(self._function.subject.gradient)
            last = self._last = _Point(weakref.ref(batch), settings, vector, loss, gradient)
        return last

    def _there(self, vector: torch.Tensor, evaluate: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """The result of `evaluate` with X set to `vector`; X is put back."""
        x = self._function.parameters
        before = x.clone()
        try:
            x.copy_(vector)
            return evaluate(*arguments)
        finally:
            x.copy_(before)

    def _read(self, name: str, given: Any, finite: bool = True) -> torch.Tensor:
        """The numbers, as X has them; `finite`: they have to be, else only to stay so."""
        x = self._function.parameters
        array = np.asarray(given)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"`{name}` must be real numbers, shape ({len(x)},); got {array.dtype}")
        if array.shape != tuple(x.shape):
            raise ValueError(f"`{name}` must have shape ({len(x)},), as `x0`; got {array.shape}")
        vector = torch.empty_like(x).copy_(torch.from_numpy(array.astype(np.float64)))
        usable = vector.isfinite()
        if not finite and name == "x":
            usable |= torch.from_numpy(~np.isfinite(array)).to(usable.device)
        if (finite or name == "x") and not bool(usable.all()):
            where = int(usable.logical_not().nonzero()[0])
            raise ValueError(f"`{name}[{where}]` is {array[where]}, not a finite number of {x.dtype}")
        return vector


def _doubles(vector: torch.Tensor) -> Doubles:
    found: Doubles = vector.detach().to("cpu", torch.float64, copy=True).numpy()
    return found


Doubles = npt.NDArray[np.float64]


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
