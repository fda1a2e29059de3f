"""f of the loaded batch over NumPy vectors, for solvers outside of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from batchopt._function.function import BatchFunction
from batchopt._function.numpy_least_squares import FlatLeastSquares
from batchopt._function.numpy_types import Doubles
from batchopt._machine.ownership import exclusive
from batchopt.errors import BatchoptError
from batchopt_workers.batch import Batch
from batchopt_workers.torch_settings import autocast_in_force


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
