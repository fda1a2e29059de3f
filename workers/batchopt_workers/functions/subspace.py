"""Directions in which derivatives are taken in place of all coordinates of X."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


class Basis(Protocol):
    """`columns` vectors of shape `(n,)`."""

    @property
    def columns(self) -> int:
        """Return their number."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products of each row, shape `(m, n)`, with each of the vectors: shape `(m, columns)`, float64."""


@dataclass(frozen=True)
class Cosines:
    """`columns` of the `size` vectors of a cosine transform, drawn, of coordinates in a drawn order with drawn signs:
    orthonormal, and products with them take n log n operations, and no matrix.

    The columns' side of the sketch of Webb, Jerad and Cartis, arXiv 2607.02194, 2026; a subsampled randomised transform
    as in Tropp, "Improved analysis of the subsampled randomized Hadamard transform", Advances in Adaptive Data Analysis
    3, 2011.
    """

    size: int
    columns: int
    seed: int

    @cached_property
    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The signs, the order, and the vectors taken."""
        random = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(2, (self.size,), generator=random).double().mul_(2).sub_(1)
        order = torch.randperm(self.size, generator=random)
        return signs, order, torch.randperm(self.size, generator=random)[: self.columns].sort().values

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Basis`."""
        signs, order, taken = self._drawn
        return _cosine_transform((rows.double() * signs)[:, order])[:, taken]

    def lift(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of the vectors with these weights, shape `(columns,)`: shape `(n,)`, float64."""
        signs, order, taken = self._drawn
        waves = torch.zeros(self.size, dtype=torch.float64)
        waves[taken] = weights
        found = torch.empty_like(waves)
        found[order] = _inverse_transform(waves)
        return found.mul_(signs)


@dataclass(frozen=True)
class Combined:
    """Sums of coordinates, or of the vectors `within`, with `weights` of shape `(n, columns)`."""

    weights: torch.Tensor
    within: Basis | None = None

    @property
    def columns(self) -> int:
        """See `Basis`."""
        return self.weights.shape[1]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Basis`."""
        rows = rows.double() if self.within is None else self.within.of(rows)
        return rows @ self.weights


def _turns(size: int) -> torch.Tensor:
    angles = torch.arange(size, dtype=torch.float64) * (math.pi / (2 * size))
    return torch.polar(torch.ones_like(angles), angles)


def _cosine_transform(rows: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal discrete cosine transform of each row, by a Fourier transform of as many numbers (Makhoul,
    "A fast cosine transform in one and two dimensions", IEEE Transactions on Acoustics, Speech and Signal Processing
    28, 1980)."""
    size = rows.shape[1]
    folded = torch.cat([rows[:, ::2], rows[:, 1::2].flip(1)], 1)
    found: torch.Tensor = (torch.fft.fft(folded) * _turns(size).conj()).real * math.sqrt(2 / size)
    found[:, 0] *= math.sqrt(0.5)
    return found


def _inverse_transform(waves: torch.Tensor) -> torch.Tensor:
    """Return the vector, shape `(n,)`, whose cosine transform this is."""
    size = len(waves)
    waves = waves * math.sqrt(size / 2)
    waves[0] *= math.sqrt(2)
    behind = torch.cat([waves.new_zeros(1), waves[1:].flip(0)])
    folded = torch.fft.ifft(torch.complex(waves, -behind) * _turns(size)).real
    found, half = torch.empty_like(waves), (size + 1) // 2
    found[::2], found[1::2] = folded[:half], folded[half:].flip(0)
    return found
