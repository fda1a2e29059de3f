"""The interface of closures for Levenberg-Marquardt: the normal equations of f, over the optimizer's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from batchopt.optim.quadratic import Products
from batchopt_workers.data.layout import reals


@runtime_checkable
class Squares(Products, Protocol):
    """A closure of f = rᵀWr that also provides the normal equations, such as `BatchOptimizer.closure`."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters with respect to which J is taken, in this order."""

    def __call__(self) -> torch.Tensor | float:
        """Evaluate f and df/dX at the parameters."""

    def normal(self, limit: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Return f, JᵀWr and JᵀWJ at the parameters, in float64."""

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        """Return JᵀW times the second derivative of r along `v`."""


class SquaresOver:
    """The normal equations of a closure over other `parameters`: in another order, or a subset; 0 for parameters that f
    does not depend on."""

    def __init__(self, squares: Squares, parameters: Sequence[torch.Tensor]) -> None:
        self._squares = squares
        start, self.size = {}, 0
        for parameter in squares.parameters:
            start[id(parameter)] = self.size
            self.size += reals(parameter.detach()).numel()
        sizes = [(id(p), reals(p.detach()).numel()) for p in parameters]
        places = [start[p] + torch.arange(n) if p in start else torch.full((n,), self.size) for p, n in sizes]
        # the index of each element in the closure's vectors, which are padded with a 0
        self._places = torch.cat(places)
        self._alike = torch.equal(self._places, torch.arange(self.size))

    def _ours(self, vector: torch.Tensor) -> torch.Tensor:
        return vector if self._alike else pad(vector, (0, 1))[self._places]

    def _theirs(self, vector: torch.Tensor) -> torch.Tensor:
        if self._alike:
            return vector
        whole = vector.new_zeros(self.size + 1)
        whole[self._places] = vector
        return whole[:-1]

    def normal(self, limit: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """See `Squares`."""
        loss, vector, matrix = self._squares.normal(limit)
        if not self._alike:
            matrix = pad(matrix, (0, 1, 0, 1))[self._places[:, None], self._places]
        return loss, self._ours(vector), matrix

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        return self._ours(self._squares.gauss_newton(self._theirs(v)))

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        """See `Squares`."""
        return self._ours(self._squares.acceleration(self._theirs(v)))
