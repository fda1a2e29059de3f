"""f and df/dX of data that comes in several batches."""

from __future__ import annotations

import torch

from batchopt_workers.weighting import Weighting


class Total:
    """The sum over batches, in float64, in the order in which they come: a mean counts by what it divides by."""

    def __init__(self, x: torch.Tensor) -> None:
        """For gradients like `x`: shape `(n,)`."""
        self._loss, self._divisor = 0.0, 0.0
        self._gradient = torch.zeros_like(x, dtype=torch.float64)
        self._dtype = x.dtype

    def add(self, loss: float, gradient: torch.Tensor, weighting: Weighting) -> None:
        """Take in f and df/dX (shape `(n,)`) of a batch that is weighed so."""
        self._loss += weighting.divisor * loss
        self._gradient.add_(gradient, alpha=weighting.divisor)
        self._divisor = 1.0 if weighting.reduction == "sum" else self._divisor + weighting.divisor

    def whole(self) -> tuple[float, torch.Tensor]:
        """f and df/dX of all batches as one; the gradient in the dtype of `x`. Raises `ValueError` if nothing counts."""
        if not self._divisor:
            raise ValueError("there is no sample that counts: no batch, or the denominators of all samples are 0")
        return self._loss / self._divisor, (self._gradient / self._divisor).to(self._dtype)
