"""What least squares needs of a piece of the batch: residuals, their Jacobian, and its products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from batchopt_workers.batch import Piece
from batchopt_workers.jacobian import PieceResiduals
from batchopt_workers.task import Surroundings

# Blocks of columns of a symmetric matrix, of which only those on and above the diagonal are computed: of more, each is
# too narrow to be fast.
STRIPES = 8
# The part of a step at which residuals are looked at for their second derivative.
PROBE = 0.1


def _each(piece: Piece, values: torch.Tensor) -> torch.Tensor:
    """Residuals or their derivatives with a row for each sample: shape `(samples, d)`."""
    return values.detach().reshape(len(piece.indices), -1)


def _weight(around: Surroundings, found: PieceResiduals, residuals: int) -> float:
    """The weight of each square in f."""
    return found.jacobian.squares.weight(around.weight, residuals)


class Residuals:
    """The residuals of each sample: shape `(samples, d)`."""

    def __call__(self, piece: Piece, around: Surroundings) -> torch.Tensor:
        return _each(piece, around.residuals().values())


class JacobianRows:
    """The rows of the Jacobian: shape `(samples, d, n)`."""

    def __call__(self, piece: Piece, around: Surroundings) -> torch.Tensor:
        rows = torch.cat([block.rows for block in around.residuals().blocks()])
        return rows.reshape(len(piece.indices), -1, rows.shape[1])


@dataclass(frozen=True)
class JacobianProduct:
    """J times a vector, shape `(n,)`: shape `(samples, d)`."""

    direction: torch.Tensor

    def __call__(self, piece: Piece, around: Surroundings) -> torch.Tensor:
        found = around.residuals()
        values = found.values()
        return _each(piece, found.jacobian.times(values, self.direction.to(values.device)))


@dataclass(frozen=True)
class TransposedProduct:
    """Jᵀ times `weights`, a number for each residual of a term: shape `(samples, d)`, or a list with those of each
    sample. Shape `(n,)`, float64."""

    weights: torch.Tensor | list[torch.Tensor]

    def __call__(self, piece: Piece, around: Surroundings) -> torch.Tensor:
        found = around.residuals()
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
    """JᵀWJ times each of the `directions` (shape `(k, n)`): shape `(k, n)`, float64. W has the weights of the squares
    in f."""

    directions: torch.Tensor

    def __call__(self, piece: Piece, around: Surroundings) -> torch.Tensor:
        found = around.residuals()
        values, products = found.values(), []
        weight = _weight(around, found, values.numel())
        for direction in self.directions.to(values.device):
            product = torch.zeros(len(direction), dtype=torch.float64, device=values.device)
            if weight != 0.0:
                along = found.jacobian.times(values, direction)
                product = found.jacobian.transposed_times(values, along.mul_(weight), keep=True)
            products.append(product)
        return torch.stack(products)


@dataclass(frozen=True)
class Accelerations:
    """JᵀW times the second derivative of the residuals along `direction` (shape `(n,)`): shape `(n,)`, float64.

    By differences of the residuals over a tenth of the direction, as Transtrum and Sethna advise ("Improvements to the
    Levenberg-Marquardt algorithm", 2012): a step is corrected by it, and not much of it has to be right.
    """

    direction: torch.Tensor

    def __call__(self, piece: Piece, around: Surroundings) -> torch.Tensor:
        found = around.residuals()
        values = found.values()
        weight = _weight(around, found, values.numel())
        direction = self.direction.to(values.device)
        if weight == 0.0:
            return torch.zeros(len(direction), dtype=torch.float64, device=values.device)
        along = found.jacobian.times(values, direction)
        with moved(around.parameters, direction * PROBE), torch.no_grad():
            ahead = found.values().detach()
        second = ((ahead - values.detach()) / PROBE - along).mul_(2 / PROBE * weight)
        return found.jacobian.transposed_times(values, second)


@contextmanager
def moved(parameters: Sequence[torch.Tensor], change: torch.Tensor) -> Iterator[None]:
    """The parameters are elsewhere in the body."""
    before = [parameter.data for parameter in parameters]
    start = 0
    try:
        for parameter in parameters:
            moved = change[start : start + parameter.numel()].view_as(parameter)
            parameter.data = parameter.data + moved
            start += parameter.numel()
        yield
    finally:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data


@dataclass(frozen=True)
class NormalSums:
    """f, JᵀWr and JᵀWJ of the residuals r, in float64, W having the weights of the squares in f. Of the matrix the
    stripes of columns that `stripes` says, as `(start, stop)`, from the diagonal on. `each`: rows that took a backward
    of their own."""

    stripes: tuple[tuple[int, int], ...]
    _room: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, piece: Piece, around: Surroundings) -> dict[str, object]:
        found = around.residuals()
        size, before = self.stripes[-1][1], found.jacobian.one_by_one
        loss = torch.zeros((), dtype=torch.float64)
        vector = torch.zeros(size, dtype=torch.float64)
        matrix = [self._zeroed(start, stop, size) for start, stop in self.stripes]
        residuals = 0
        for block in found.blocks() if around.weight != 0.0 else ():
            values, rows = block.residuals.to("cpu", torch.float64), block.rows.to("cpu", torch.float64)
            residuals += len(values)
            loss += values.square().sum()
            vector.addmv_(rows.T, values)
            for (start, stop), stripe in zip(self.stripes, matrix, strict=True):
                stripe.addmm_(rows[:, start:stop].T, rows[:, start:])
        weight = _weight(around, found, residuals)
        each = float(found.jacobian.one_by_one - before)
        return {
            "loss": loss.mul_(weight),
            "vector": vector.mul_(weight),
            "matrix": [stripe.mul_(weight) for stripe in matrix],
            "each": each,
        }

    def _zeroed(self, start: int, stop: int, size: int) -> torch.Tensor:
        """Memory that was used for a piece before: new memory of this size would cost as much as a sum."""
        if start not in self._room:
            self._room[start] = torch.empty(stop - start, size - start, dtype=torch.float64)
        return self._room[start].zero_()


def stripes(size: int) -> tuple[tuple[int, int], ...]:
    """The stripes of columns of a matrix of that size."""
    bounds: Sequence[int] = sorted({round(size * i / STRIPES) for i in range(STRIPES + 1)})
    return tuple(pairwise(bounds))
