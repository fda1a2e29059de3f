"""Closures for Levenberg-Marquardt: the normal equations of f over the optimizer's parameters, also from residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from batchopt.optim.quadratic import DenseModel, Products, Rows, RowsModel, SubspaceModel
from batchopt_workers.functions.jacobian import ROOM, dense, product_with
from batchopt_workers.functions.least_squares import numbers_of, placed, second_difference
from batchopt_workers.functions.squares import checked
from batchopt_workers.functions.subspace import Basis, Combined, Cosines
from batchopt_workers.life.torch_settings import differentiable_twice
from batchopt_workers.wire.layout import reals

# f must agree with the sum of squares of the normal equations to this fraction of the dtype's digits.
SAME = 0.5
# Rows of a Jacobian that are held, all of them, in bytes.
HELD = 2**30


@runtime_checkable
class Squares(Products, Protocol):
    """A closure of f = rᵀWr that also provides the normal equations, such as `BatchOptimizer.closure`."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters with respect to which J is taken, in this order."""

    def __call__(self) -> torch.Tensor | float:
        """Evaluate f and df/dX at the parameters."""

    def normal(self, limit: int, basis: Basis | None = None) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Return f, JᵀWr and JᵀWJ at the parameters, in float64; of J times the vectors of the `basis`, if given."""

    def rows(self, most: int) -> Rows | None:
        """Return the rows of J with their weights at the parameters; None if there are more than `most`."""

    def accelerations(self, directions: torch.Tensor) -> torch.Tensor:
        """Return JᵀW times the second derivative of r along each of these rows: shape `(k, n)`."""

    def losses(self, points: torch.Tensor) -> torch.Tensor:
        """Return f at each of the points, shape `(K, n)`: shape `(K,)`, float64, infinity where it is not finite."""


class SquaresOver:
    """The normal equations of a closure over other `parameters`, on their device: in another order, or a subset; 0 for
    parameters that f does not depend on."""

    def __init__(self, squares: Squares, parameters: Sequence[torch.Tensor]) -> None:
        self._squares, self._device = squares, parameters[0].device
        self._dtype = torch.promote_types(parameters[0].dtype.to_real(), torch.float32)  # of X
        start, self.size = {}, 0
        for parameter in squares.parameters:
            start[id(parameter)] = self.size
            self.size += reals(parameter.detach()).numel()
        sizes = [(id(p), reals(p.detach()).numel()) for p in parameters]
        places = [start[p] + torch.arange(n) if p in start else torch.full((n,), self.size) for p, n in sizes]
        # the index of each element in the closure's vectors, which are padded with a 0
        self._places = torch.cat(places)
        self._alike = torch.equal(self._places, torch.arange(self.size))

    def losses(self, points: torch.Tensor) -> torch.Tensor:
        """See `Squares`: what is not among ours stays."""
        if not self._alike:
            whole = pad(numbers_of(self._squares.parameters), (0, 1)).repeat(len(points), 1)
            whole[:, self._places] = points.to(whole)
            points = whole[:, :-1]
        return self._squares.losses(points)

    def _ours(self, vector: torch.Tensor) -> torch.Tensor:
        vector = vector.to(self._device)  # a batch's sums over workers are on the CPU
        return vector if self._alike else pad(vector, (0, 1))[self._places]

    def _theirs(self, vector: torch.Tensor) -> torch.Tensor:
        if self._alike:
            return vector
        whole = vector.new_zeros(self.size + 1)
        whole[self._places] = vector
        return whole[:-1]

    def dense_model(self, f: float, before: torch.Tensor | None, each: bool) -> DenseModel:
        """Return the model around the parameters, where f has this value; see `DenseModel`. Raises `ValueError` if f is
        not the sum of these squares."""
        loss, vector, matrix = self._squares.normal(self.size)
        self._check_same(loss, f)
        matrix = matrix.to(self._device)
        if not self._alike:
            matrix = pad(matrix, (0, 1, 0, 1))[self._places[:, None], self._places]

        def again(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            theirs = weights if self._alike else torch.stack([self._theirs(column) for column in weights.T], 1)
            return self._on_device(self._squares.normal(self.size, Combined(theirs.cpu())))

        return DenseModel(self._ours(vector), matrix, before, each, again if self._dtype is torch.float64 else None)

    def subspace_model(
        self, basis: Cosines, f: float, vector: torch.Tensor, before: torch.Tensor | None
    ) -> SubspaceModel:
        """Return the model along the vectors of the basis; `vector` is JᵀWr. Raises `ValueError` if f is not the sum of
        these squares, or our parameters are not all of theirs in the same order."""
        if not self._alike or not all(parameter.requires_grad for parameter in self._squares.parameters):
            raise ValueError(
                f"step='longest' for {self.size:,} parameters, which are more than `dense`, needs all parameters of f, "
                "in their order, and none of them frozen: give `dense`, or step='first'"
            )
        found = self._squares.normal(basis.columns, basis)
        self._check_same(found[0], f)

        def again(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._on_device(self._squares.normal(basis.columns, Combined(weights.cpu(), basis)))

        before = None if before is None else before[: basis.columns]
        exact = again if self._dtype is torch.float64 else None
        return SubspaceModel(DenseModel(*self._on_device(found), before, False, exact), basis, vector)

    def rows_model(self, most: int, f: float, before: torch.Tensor | None) -> RowsModel | None:
        """Return the model with rows; None if there are more than `most`, or than fit into `HELD`, or they are not
        finite. Raises `ValueError` if f is not the sum of these squares."""
        found = self._squares.rows(min(most, HELD // (8 * self.size)))
        if found is None:
            return None
        self._check_same(found.loss, f)
        slopes, weights, rows = (tensor.to(self._device) for tensor in found[1:])
        rows = rows if self._alike else pad(rows, (0, 1))[:, self._places]
        model = RowsModel(Rows(found.loss, slopes, weights, rows), before, self._dtype is torch.float64)
        return model if model.is_finite else None

    def _on_device(self, found: tuple[float, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        _, vector, matrix = found
        return vector.to(self._device), matrix.to(self._device)

    def _check_same(self, loss: float, f: float) -> None:
        if abs(loss - f) > torch.finfo(self._dtype).eps ** SAME * abs(f):
            raise ValueError(
                f"the sum of the squares is {loss:.9g} where f is {f:.9g}: f has to be the mean squares of the terms "
                "and nothing else, and the same at each evaluation"
            )

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        return self._ours(self._squares.gauss_newton(self._theirs(v)))

    def accelerations(self, directions: torch.Tensor) -> torch.Tensor:
        """See `Squares`."""
        theirs = torch.stack([self._theirs(direction) for direction in directions])
        return torch.stack([self._ours(row) for row in self._squares.accelerations(theirs)])


# `closure()` returns a tensor of residuals, of any shape but a scalar's.
ResidualsClosure = Callable[[], torch.Tensor]


class ResidualSquares:
    """f, the sum of the squares of the closure's residuals, and its normal equations, over `parameters`."""

    def __init__(self, closure: ResidualsClosure, parameters: Sequence[torch.Tensor]) -> None:
        self._closure, self.parameters = closure, parameters
        self._sizes = [reals(parameter.detach()).numel() for parameter in parameters]
        self._size = sum(self._sizes)

    def __call__(self) -> torch.Tensor:
        """Return f, and set df/dX in each `.grad`."""
        residuals = self._residuals()
        for parameter, gradient in zip(self.parameters, self._backward(residuals, 2 * residuals.detach()), strict=True):
            parameter.grad = gradient
        return residuals.detach().double().square().sum()

    def normal(self, limit: int, basis: Basis | None = None) -> tuple[float, torch.Tensor, torch.Tensor]:
        """See `Squares`."""
        with torch.enable_grad():
            residuals = self._residuals().reshape(-1)
        columns = self._size if basis is None else basis.columns
        vector = torch.zeros(columns, dtype=torch.float64, device=residuals.device)
        matrix = vector.new_zeros(columns, columns)
        values = residuals.detach().double()
        for which in self._parts(residuals):
            rows = self._rows(residuals, which).double()
            rows = rows if basis is None else basis.of(rows)
            vector.addmv_(rows.T, values[which.start : which.stop])
            matrix.addmm_(rows.T, rows)
        return float(values.square().sum()), vector, matrix

    def rows(self, most: int) -> Rows | None:
        """See `Squares`."""
        with torch.enable_grad():
            residuals = self._residuals().reshape(-1)
        if len(residuals) > most:
            return None
        rows = torch.cat([self._rows(residuals, which).double() for which in self._parts(residuals)])
        values = residuals.detach().double()
        return Rows(float(values.square().sum()), values, torch.ones_like(values), rows)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        residuals = self._residuals()
        return self._joined(self._backward(residuals, self._along(residuals, v)))

    def accelerations(self, directions: torch.Tensor) -> torch.Tensor:
        """See `Squares`: by finite differences, like `BatchOptimizer.closure`."""
        residuals = self._residuals()
        found = []
        for direction in directions.to(self.parameters[0].dtype.to_real()):
            second = second_difference(residuals, self._residuals, self.parameters, direction)
            found.append(self._joined(self._backward(residuals, second)))
        return torch.stack(found)

    def losses(self, points: torch.Tensor) -> torch.Tensor:
        """See `Squares`."""
        found = []
        for point in points:
            with placed(self.parameters, point):
                f = self._residuals().detach().double().square().sum()
            found.append(f.nan_to_num(nan=math.inf, posinf=math.inf))
        return torch.stack(found)

    def _residuals(self) -> torch.Tensor:
        with torch.enable_grad(), differentiable_twice():
            found = checked(self._closure())
        if found.dim() == 0:
            raise TypeError(
                "the closure of LevenbergMarquardt returned a scalar: return the residuals themselves, whose squares "
                "it sums, or use BatchOptimizer.step, or pass BatchOptimizer.closure"
            )
        if not found.requires_grad:
            raise ValueError("the residuals depend on no parameter: look for .detach() or torch.no_grad() on their way")
        return found

    def _backward(self, residuals: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad(residuals, [*self.parameters], weights, retain_graph=True, allow_unused=True)
        pairs = zip(found, self.parameters, strict=True)
        return [torch.zeros_like(parameter) if g is None else dense(g) for g, parameter in pairs]

    def _parts(self, residuals: torch.Tensor) -> list[range]:
        """Return as many residuals at a time as there is room for their rows."""
        count = max(ROOM // (8 * self._size), 1)
        return [range(start, min(start + count, len(residuals))) for start in range(0, len(residuals), count)]

    def _rows(self, residuals: torch.Tensor, which: range) -> torch.Tensor:
        """Return the rows of these residuals by a batched backward, or one by one where that is unsupported."""
        units = torch.zeros(len(which), len(residuals), dtype=residuals.dtype, device=residuals.device)
        units[torch.arange(len(which)), torch.tensor(which)] = 1.0
        try:
            found = torch.autograd.grad(
                residuals, [*self.parameters], units, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except RuntimeError:  # a function without a batching rule
            return torch.stack([self._joined(self._backward(residuals, unit)) for unit in units])
        pairs = zip(found, self._sizes, strict=True)
        flat = [units.new_zeros(len(which), n) if g is None else reals(g).reshape(len(which), -1) for g, n in pairs]
        return torch.cat(flat, dim=1)

    def _along(self, residuals: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return J times a vector of any precision, in the shape of the residuals."""
        parts = torch.split(v.to(self.parameters[0].dtype.to_real()), self._sizes)
        return product_with(residuals, self.parameters, parts)

    def _joined(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([reals(gradient).reshape(-1) for gradient in gradients])
