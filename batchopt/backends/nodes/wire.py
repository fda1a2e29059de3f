"""Compressed gradients on the wire between machines: a member rounds what it sends, and adds the rest to its next
gradient.

Compression with error feedback: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent and its
application to data-parallel distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from batchopt.backends.base import Setup
from batchopt.backends.nodes.compression import Compression, DoesNotFit, compress
from batchopt_workers.wire.layout import Layout


class Wire:
    """Encodes and decodes a member's gradients, which have `layout`. The residual lives as long as the member, and
    belongs to no state: runs that are resumed go on from the one that is there."""

    def __init__(self, compression: Compression, layout: Layout) -> None:
        self._compression, self._layout = compression, layout
        self._evaluation = 0  # the last one, which began from `_before`
        self._before: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._next: torch.Tensor | None = None  # the residual, once all have the gradient

    def encode(
        self, gradients: Sequence[torch.Tensor], members: int, evaluation: int, samples: range
    ) -> list[torch.Tensor]:
        """Encode this member's gradient, of these samples, one of `members`; return nothing if it is not finite, since
        it must then be sent uncompressed. An evaluation that is made again begins from the same residual; a member
        without a share keeps it. Raises `DoesNotFit`."""
        if evaluation != self._evaluation:
            self._evaluation, self._before = evaluation, self._residual
        self._residual = self._next = self._before
        if not gradients:
            return []
        try:
            found = compress(self._compression, gradients[0], self._before, members)
        except DoesNotFit as error:
            error.samples = samples
            raise
        if found is None:
            return []
        self._next = found.residual
        return [found.code]

    def delivered(self) -> None:
        """Keep the residual of the gradient that was encoded last: no member has failed, so it counts."""
        self._residual = self._next

    def decode(self, code: torch.Tensor, members: int) -> torch.Tensor:
        """Decode the gradient of one of `members` members."""
        return self._compression.decode(code, members, self._layout.size, self._layout.sum_dtype)

    def lost_with(self, name: str) -> None:
        """Warn that a member was lost, and its residual with it."""
        if self._evaluation and self._compression.keeps_residual:
            lost = f"{name} was lost together with what compression had left of its gradients"
            warnings.warn(lost, RuntimeWarning, stacklevel=2)


def wire_of(setup: Setup) -> Wire | None:
    """Return the wire of a member; None if gradients are not compressed."""
    return None if setup.compression is None else Wire(setup.compression, setup.flat.layout)
