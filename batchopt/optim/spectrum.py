"""Normal equations by the singular values of the Jacobian: damped steps, and the damping for a length of the step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

# Bisections of the logarithm of a damping, over the interval in which it must be: to the rounding of that logarithm.
HALVINGS = 64
# The smallest damping, as a fraction of the largest value: in double precision no smaller one changes a step.
LOWEST = 1e-40
# Eigenvalues are exact to the rounding of the largest: at dampings below this fraction of it steps are rounding.
LOST = 2.0**-46

# `normal(basis)` returns JᵀWr and JᵀWJ with J times the basis, shape `(n, n)`, in place of J.
InBasis = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Spectrum:
    """The squares of the singular values of √W J, `values`, the vectors on its right, shape `(n, n)`, and `slopes`, the
    components of JᵀWr along these; all float64."""

    def __init__(self, values: torch.Tensor, vectors: torch.Tensor, slopes: torch.Tensor) -> None:
        self._values, self._vectors, self._slopes = values, vectors, slopes

    @classmethod
    def of(cls, vector: torch.Tensor, matrix: torch.Tensor) -> Spectrum:
        """Return those of JᵀWr and JᵀWJ."""
        values, vectors = torch.linalg.eigh(matrix)
        return cls(values.clamp(min=0.0), vectors, vectors.T @ vector)

    def refined(self, normal: InBasis) -> Spectrum:
        """Return the same with the digits that squaring J has lost: singular values are exact to the rounding of the
        largest one, as by a QR decomposition of J.

        `normal` sums over the rows of J once more, in coordinates in which its columns are almost orthonormal as far as
        eigenvalues were resolved, and all the smaller otherwise. After the shifted Cholesky QR of Fukaya, Kannan,
        Nakatsukasa, Yamamoto and Yanagisawa, SIAM Journal on Scientific Computing 42, 2020; with eigenvalues in place
        of Cholesky's factor, since columns may be dependent.
        """
        order = self._values.argsort(descending=True)  # the decomposition below resolves columns that become smaller
        values, vectors = self._values[order], self._vectors[:, order]
        floor = max(float(values[0]) * len(values) * sys.float_info.epsilon, sys.float_info.min)
        sizes = values.clamp(min=floor).sqrt()
        slopes, gram = normal(vectors / sizes)
        lengths = gram.diagonal().clamp(min=sys.float_info.min).sqrt()
        cosines, axes = torch.linalg.eigh(gram / lengths / lengths[:, None])
        roots = cosines.clamp(min=0.0).sqrt()
        left, found, right = torch.linalg.svd(roots[:, None] * axes.T * (lengths * sizes))
        # of the residuals, as far as columns of J reach them
        reached = (axes.T @ (slopes / lengths)) / roots.clamp(min=sys.float_info.epsilon)
        return Spectrum(found.square(), vectors @ right.T, found * (left.T @ reached))

    def loses(self, damping: float) -> bool:
        """Tell whether a step at this damping has lost digits."""
        return damping < LOST * float(self._values.max())

    def minimum(self, damping: float) -> torch.Tensor:
        """Return the step to the minimum of the damped model."""
        return self._vectors @ (-self._slopes / (self._values + damping))

    def solve(self, right: torch.Tensor, damping: float) -> torch.Tensor:
        """Return s with (JᵀWJ + damping) s = right, shapes `(n,)`."""
        return self._vectors @ ((self._vectors.T @ right) / (self._values + damping))

    def dampings(self, lengths: torch.Tensor, image: bool = False) -> torch.Tensor:
        """Return for each length, shape `(k,)`, the damping at which the step is that long, or the lowest if it is
        shorter even then: the secular equation of Moré and Sorensen, "Computing a trust region step", SIAM Journal on
        Scientific and Statistical Computing 4, 1983; by bisection, since there are many, and one costs n operations.
        `image`: the lengths are those of √W J times the step."""
        slopes = self._slopes * self._values.sqrt() if image else self._slopes
        above = (float(slopes.norm()) / lengths).log()  # a step is no longer than the slopes / damping
        largest = max(float(self._values.max()), sys.float_info.min)
        below = above.clamp(max=math.log(largest) + math.log(LOWEST))
        for _ in range(HALVINGS):
            middle = (above + below) / 2
            longer = (slopes / (self._values + middle.exp()[:, None])).norm(dim=1) > lengths
            below, above = torch.where(longer, middle, below), torch.where(longer, above, middle)
        return above.exp()
