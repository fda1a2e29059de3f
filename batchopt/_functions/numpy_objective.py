"""f of the loaded batch over NumPy vectors, for solvers outside torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from batchopt._engine.engine import Engine
from batchopt._functions.derivatives import hessian_products
from batchopt._functions.least_squares import (
    Roots,
    flat,
    jacobian,
    jacobian_product,
    residuals,
    square_roots,
    transposed_product,
)
from batchopt._machine.ownership import exclusive
from batchopt._program.checksum import checksum
from batchopt._program.program import snapshot_of
from batchopt.errors import BatchoptError
from batchopt_workers.batch.batch import Batch
from batchopt_workers.life.torch_settings import autocast_in_force


class _Point(NamedTuple):
    """f and df/dX of a batch at `x`, under these `conditions`: torch's settings, and the rest of what f depends on."""

    batch: weakref.ref[Batch]
    conditions: tuple[object, ...]
    x: torch.Tensor
    loss: float
    gradient: Doubles


class FlatObjective:
    """f of a flat vector `x`, its gradient and its Hessian, on the workers of a `BatchOptimizer`.

    Vectors are NumPy arrays, float64, shape `(n,)`, in the order of `parameters`; `x` and `v` may be anything that
    converts to a real array. A call leaves the module's parameters unchanged, even if it raises; only `assign` changes
    them. The last point is cached, so that the value and then the gradient at one `x` take one evaluation, until
    anything that f depends on has changed: module, losses, hooks, frozen parameters, buffers. f is that of
    the batch loaded at the time of the call, with the same draws for as long as it is loaded (one step).

    Where `x` has NaN or infinity, as some solvers try, f, gradient and products are NaN; where f is not finite, they
    are returned as they are, whatever `on_nonfinite` says, so that a solver can step back. All calls raise `TypeError`
    or `ValueError` for anything but a vector of real numbers of that length or for numbers outside the range of X's
    dtype, and what `BatchOptimizer.evaluate` raises. `assign` takes finite numbers only.
    """

    def __init__(self, engine: Engine, evaluate: Callable[[], torch.Tensor]) -> None:
        """Evaluate the function of the loaded batch by calling `evaluate`."""
        self._engine, self._owner, self._evaluate = engine, engine.owner, evaluate
        self._see()
        self._last: _Point | None = None

    def __repr__(self) -> str:
        return f"FlatObjective({self._engine.subject.x.numel()} parameters)"

    @property
    def x0(self) -> Doubles:
        """A new array with the module's current parameters."""
        return _doubles(self._engine.parameters)

    @exclusive
    def __call__(self, x: Any) -> float:
        """Return f at `x`."""
        return self._at(x).loss

    @exclusive
    def gradient(self, x: Any) -> Doubles:
        """Return df/dX at `x`: a new array."""
        return self._at(x).gradient.copy()

    @exclusive
    def value_and_grad(self, x: Any) -> tuple[float, Doubles]:
        """Return f and df/dX at `x`."""
        point = self._at(x)
        return point.loss, point.gradient.copy()

    @exclusive
    def hvp(self, x: Any, v: Any) -> Doubles:
        """Return the Hessian at `x` times `v`: a new array; NaN if `v` is not finite, as some solvers try."""
        self._engine.current_step()
        vector, direction = self._read("x", x, finite=False), self._read("v", v, finite=False)
        if not bool(vector.isfinite().all()):
            return np.full(len(vector), np.nan)
        with self._engine.under(on_nonfinite="keep"):
            return _doubles(self._there(vector, hessian_products, self._engine, direction))

    def least_squares(self) -> FlatLeastSquares:
        """Return the residuals and their Jacobian, if f is a sum of squares: for `scipy.optimize.least_squares`."""
        return FlatLeastSquares(self._engine, self._residuals_at)

    @exclusive
    def _residuals_at(self, x: Any, evaluate: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._engine.current_step()
        return self._there(self._read("x", x), evaluate)

    @exclusive
    def assign(self, x: Any) -> None:
        """Make `x` the module's parameters."""
        self._engine.parameters.copy_(self._read("x", x))
        self._engine.subject.written()

    def __reduce__(self) -> NoReturn:
        raise BatchoptError(  # solvers would mistake a `TypeError` for one raised by the function
            "this evaluates on the workers of a BatchOptimizer and cannot be copied, or sent to processes of a "
            "solver: have the solver call it in this process (differential_evolution(..., workers=1)); each call is "
            "parallel already"
        )

    def _at(self, x: Any) -> _Point:
        batch, vector = self._engine.current_step().batch, self._read("x", x, finite=False)
        last = self._last
        if not bool(vector.isfinite().all()):
            return _Point(weakref.ref(batch), (), vector, np.nan, np.full(len(vector), np.nan))
        if last is not None and last.batch() is batch and torch.equal(last.x, vector):
            if self._seen.looks_the_same() and last.conditions == self._conditions():
                return last
        self._last = None
        with self._engine.under(on_nonfinite="keep"):
            loss = self._there(vector, self._evaluate).item()
        if not self._seen.refers():  # a forward has written, or the user before it
            self._see()
        gradient = _doubles(self._engine.subject.gradient)
        last = self._last = _Point(weakref.ref(batch), self._conditions(), vector, loss, gradient)
        return last

    def _see(self) -> None:
        """Take a snapshot of what f depends on, as it is now."""
        trained, module = set(map(id, self._engine.subject.parameters)), self._engine.subject.module
        self._seen = snapshot_of(self._engine.workers.program, hooks=False)
        found = [*(met.tensor for met in self._seen.tensors), *module.buffers()]  # those of torch.jit in no dict
        self._tensors = [*{id(tensor): tensor for tensor in found if id(tensor) not in trained}.values()]

    def _conditions(self) -> tuple[object, ...]:
        settings = torch.get_default_dtype(), torch.get_float32_matmul_precision(), autocast_in_force()
        return *settings, self._engine.workers.hooks, checksum(self._tensors)

    def _there(self, vector: torch.Tensor, evaluate: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return the result of `evaluate` with X set to `vector`; X is restored."""
        x = self._engine.parameters
        before = x.clone()
        try:
            x.copy_(vector)
            return evaluate(*arguments)
        finally:
            x.copy_(before)

    def _read(self, name: str, given: Any, finite: bool = True) -> torch.Tensor:
        """Return the numbers in X's dtype; `finite`: reject NaN and infinity, else only overflow in `x`."""
        x = self._engine.parameters
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
        """Return the result of `evaluate` with X set to `x`; X is restored."""


class FlatLeastSquares:
    """The residuals of f as functions of a flat vector `x`, each scaled with the root of twice its weight in f: f is
    half the sum of their squares, the convention of `scipy.optimize.least_squares`. Under a robust loss each residual
    is replaced by the signed root of its contribution, so that any method minimises f if SciPy's `loss` is omitted.

    Vectors are NumPy arrays, float64, shape `(n,)` for `x` and `(N,)` for the residuals, which are ordered by term,
    then by sample, then by the numbers of a sample. Otherwise it behaves like `FlatObjective`; raises what
    `BatchOptimizer.residuals` raises.
    """

    def __init__(self, engine: Engine, at: At) -> None:
        """Evaluate at other points by calling `at`."""
        self._engine, self._at = engine, at

    def fun(self, x: Any) -> Doubles:
        """Return the residuals at `x`."""
        return _array(self._at(x, lambda: torch.cat([roots.values for roots in self._roots().values()])))

    def jac(self, x: Any) -> Doubles:
        """Return their Jacobian at `x`, held in memory in full: shape `(N, n)`."""
        return _array(self._at(x, lambda: self._scaled(jacobian(self._engine))))

    def operator(self, x: Any) -> LinearOperator:
        """Return their Jacobian at `x` as a linear operator, each product taking about two evaluations: for large
        problems (`jac=...` with `tr_solver="lsmr"`). Needs SciPy."""
        from scipy.sparse.linalg import LinearOperator

        point = np.array(x, dtype=np.float64)
        count = len(self.fun(point))

        def times(v: Any) -> Doubles:
            direction = torch.from_numpy(np.array(v, dtype=np.float64).reshape(-1))
            return _array(self._at(point, lambda: self._scaled(jacobian_product(self._engine, direction))))

        def transposed(u: Any) -> Doubles:
            weights = torch.from_numpy(np.array(u, dtype=np.float64).reshape(-1))
            return _array(self._at(point, lambda: self._transposed(weights)))

        found: LinearOperator = LinearOperator((count, len(point)), matvec=times, rmatvec=transposed, dtype=np.float64)
        return found

    def _roots(self) -> dict[str | None, Roots]:
        return square_roots(self._engine, _by_name(residuals(self._engine, None, None)))

    def _scaled(self, found: Any) -> torch.Tensor:
        """Concatenate derivatives of the residuals of all terms, `(samples, d, ...)` each, to one row per residual."""
        parts = {name: flat(part).double() for name, part in _by_name(found).items()}
        roots = self._roots()
        return torch.cat(
            [
                part * (roots[name].slopes[:, None] if part.dim() > 1 else roots[name].slopes)
                for name, part in parts.items()
            ]
        )

    def _transposed(self, weights: torch.Tensor) -> torch.Tensor:
        found = _by_name(residuals(self._engine, None, None))
        roots = square_roots(self._engine, found)
        split = torch.split(weights, [len(one.slopes) for one in roots.values()])
        parts = dict(zip(found, split, strict=True))
        scaled = {name: _like(found[name], part * roots[name].slopes) for name, part in parts.items()}
        return transposed_product(self._engine, scaled[None] if None in scaled else scaled)


def _by_name(found: Any) -> dict[str | None, Any]:
    return dict(found) if isinstance(found, Mapping) else {None: found}


def _like(found: Any, numbers: torch.Tensor) -> Any:
    """Return these numbers in the form of the residuals."""
    if isinstance(found, torch.Tensor):
        return numbers.view(found.shape)
    pieces = torch.split(numbers, [one.numel() for one in found])
    return [piece.view(one.shape) for piece, one in zip(pieces, found, strict=True)]


def _array(found: torch.Tensor) -> Doubles:
    array: Doubles = found.detach().to(torch.float64).numpy()
    return array
