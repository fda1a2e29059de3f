"""Functions of a piece of the batch for least squares: residuals, their Jacobian, and its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from batchopt_workers.batch.batch import Piece
from batchopt_workers.functions.jacobian import Block, PieceResiduals
from batchopt_workers.functions.squares import of_residuals
from batchopt_workers.functions.subspace import Basis
from batchopt_workers.functions.task import PieceContext
from batchopt_workers.wire.layout import in_form_of, reals

# Column blocks of a symmetric matrix, computed only on and above the diagonal: more or narrower ones are slower.
STRIPES, NARROWEST = 8, 64
# The fraction of a step over which residuals are differenced for their second derivative.
PROBE = 0.1


def _each(piece: Piece, values: torch.Tensor) -> torch.Tensor:
    """Return residuals or their derivatives with a row for each sample: shape `(samples, d)`."""
    return values.detach().reshape(len(piece.indices), -1)


def _metric(context: PieceContext, found: PieceResiduals, values: torch.Tensor) -> float | torch.Tensor:
    """Return W, the factor between Jᵀ and J in the normal equations, in the shape of the residuals or as a number."""
    squares, weights = found.jacobian.squares, of_residuals(found.sample_weight, values)
    scale = squares.weight(context.weight, values.numel(), found.sample_weight)
    return squares.curvature(values.detach()) * weights * scale


class Residuals:
    """The residuals of each sample: shape `(samples, d)`."""

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        return _each(piece, context.residuals().values())


class JacobianRows:
    """The rows of the Jacobian: shape `(samples, d, n)`."""

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        rows = torch.cat([block.rows for block in context.residuals().blocks()])
        return rows.reshape(len(piece.indices), -1, rows.shape[1])


@dataclass(frozen=True)
class JacobianProduct:
    """J times a vector of shape `(n,)`: shape `(samples, d)`."""

    direction: torch.Tensor

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        found = context.residuals()
        values = found.values()
        return _each(piece, found.jacobian.times(values, self.direction.to(values.device)))


@dataclass(frozen=True)
class TransposedProduct:
    """Jᵀ times `weights`, a number for each residual of a term: shape `(samples, d)`, or a list with those of each
    sample. The product has shape `(n,)`, float64."""

    weights: torch.Tensor | list[torch.Tensor]

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        found = context.residuals()
        values = found.values()
        indices = piece.indices
        own = self.weights[indices.start : indices.stop]
        weights = torch.cat([one.reshape(-1) for one in own]).to(values)
        if weights.numel() != values.numel():
            raise ValueError(
                f"`u` has {own[0].numel()} numbers a sample, and there are {values.numel() // len(own)} residuals: it "
                "must have the shape of residuals()"
            )
        return found.jacobian.transposed_times(values, weights.reshape(values.shape))


@dataclass(frozen=True)
class GaussNewtonProducts:
    """JᵀWJ times each of the `directions` (shape `(k, n)`): shape `(k, n)`, float64. W: see `NormalSums`."""

    directions: torch.Tensor

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        found = context.residuals()
        values, products = found.values(), []
        metric = _metric(context, found, values)
        for direction in self.directions.to(values.device):
            product = torch.zeros(len(direction), dtype=torch.float64, device=values.device)
            if context.weight != 0.0:
                along = found.jacobian.times(values, direction)
                product = found.jacobian.transposed_times(values, along.mul_(metric), keep=True)
            products.append(product)
        return torch.stack(products)


@dataclass(frozen=True)
class Accelerations:
    """JᵀW times the second derivative of the residuals along each of the `directions` (shape `(k, n)`): shape `(k, n)`,
    float64.

    It uses differences of the residuals over a tenth of a direction, as recommended by Transtrum and Sethna
    ("Improvements to the Levenberg-Marquardt algorithm", 2012): it only corrects a step, so little accuracy is needed.
    """

    directions: torch.Tensor

    def __call__(self, piece: Piece, context: PieceContext) -> torch.Tensor:
        found = context.residuals()
        values = found.values()
        directions = self.directions.to(values.device)
        products = torch.zeros(directions.shape, dtype=torch.float64, device=values.device)
        if context.weight == 0.0:
            return products
        metric = _metric(context, found, values)
        for direction, product in zip(directions, products, strict=True):
            second = second_difference(values, found.values, context.parameters, direction)
            product.copy_(found.jacobian.transposed_times(values, second.mul_(metric), keep=True))
        return products


def second_difference(
    values: torch.Tensor,
    again: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    direction: torch.Tensor,
) -> torch.Tensor:
    """Return the second derivative of residuals along a direction by differences ahead, within the step that it is, so
    that no bound is passed. `again()` evaluates the residuals, which are `values` at the parameters."""
    x, ahead = numbers_of(parameters), []
    for part in (PROBE, 2 * PROBE):
        with placed(parameters, x + direction * part), torch.no_grad():
            ahead.append(again().detach())
    return (values.detach() - 2 * ahead[0] + ahead[1]).div_(PROBE**2)


@contextmanager
def placed(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> Iterator[None]:
    """Set the parameters to the numbers `x`, shape `(n,)`, for the body."""
    before = [parameter.data for parameter in parameters]
    start = 0
    try:
        for parameter in parameters:
            stop = start + reals(parameter.data).numel()
            parameter.data = in_form_of(parameter, x[start:stop])
            start = stop
        yield
    finally:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data


def numbers_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the real numbers of the parameters, shape `(n,)`."""
    return torch.cat([reals(parameter.detach()).reshape(-1) for parameter in parameters])


@dataclass(frozen=True)
class NormalSums:
    """f, half of its gradient and JᵀWJ, in float64. W has the weights of the squares in f, times the curvature of a
    robust loss. The matrix is given by its stripes of columns, `stripes` as `(start, stop)`, from the diagonal on.
    `each`: number of rows that took a backward of their own. `known`: the residuals and the Jacobian of the batch, with
    a row for each sample, if they are. `basis`: of J times these vectors in place of J."""

    stripes: tuple[tuple[int, int], ...]
    known: tuple[torch.Tensor, torch.Tensor] | None = None
    basis: Basis | None = None
    _room: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, piece: Piece, context: PieceContext) -> dict[str, object]:
        found = context.residuals()
        size, before = self.stripes[-1][1], found.jacobian.one_by_one
        loss = torch.zeros((), dtype=torch.float64)
        vector = torch.zeros(size, dtype=torch.float64)
        matrix = [self._zeroed(start, stop, size) for start, stop in self.stripes]
        squares, residuals, samples = found.jacobian.squares, 0, 0
        blocks = found.blocks() if self.known is None else [self._block(self.known, piece.indices)]
        for block in blocks if context.weight != 0.0 else ():
            values, rows = block.residuals.to("cpu", torch.float64), block.rows.to("cpu", torch.float64)
            rows = rows if self.basis is None else self.basis.of(rows)
            weights, own = found.sample_weight, slice(samples, samples + block.samples)
            each = of_residuals(None if weights is None else weights.reshape(-1)[own], values)
            residuals, samples = residuals + len(values), own.stop
            loss += (squares.of(values) * each).sum()
            vector.addmv_(rows.T, squares.slope(values) * each * values)
            metric = squares.curvature(values) * each
            left = rows * metric[:, None] if isinstance(metric, torch.Tensor) else rows
            for (start, stop), stripe in zip(self.stripes, matrix, strict=True):
                stripe.addmm_(left[:, start:stop].T, rows[:, start:])
        weight = squares.weight(context.weight, residuals, found.sample_weight)
        each_took = float(found.jacobian.one_by_one - before)
        return {
            "loss": loss.mul_(weight),
            "vector": vector.mul_(weight),
            "matrix": [stripe.mul_(weight) for stripe in matrix],
            "each": each_took,
        }

    @staticmethod
    def _block(known: tuple[torch.Tensor, torch.Tensor], samples: range) -> Block:
        residuals, rows = (tensor[samples.start : samples.stop].flatten(0, 1).clone() for tensor in known)
        return Block(residuals, rows, len(samples))

    def _zeroed(self, start: int, stop: int, size: int) -> torch.Tensor:
        """Return memory that was used for an earlier piece: new memory of this size would take as long as a sum."""
        if start not in self._room:
            self._room[start] = torch.empty(stop - start, size - start, dtype=torch.float64)
        return self._room[start].zero_()


def stripes(size: int) -> tuple[tuple[int, int], ...]:
    """Return the stripes of columns of a matrix of that size."""
    count = max(min(STRIPES, size // NARROWEST), 1)
    bounds: Sequence[int] = sorted({round(size * i / count) for i in range(count + 1)})
    return tuple(pairwise(bounds))
