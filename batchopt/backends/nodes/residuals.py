"""The rest that compression leaves of a member's gradients, to be added to its next ones.

Compression with error feedback: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent and its
application to data-parallel distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from batchopt._mapreduce.compression import Compression, DoesNotFit, compress
from batchopt.backends.base import Setup
from batchopt_workers.data.layout import Layout


class Round(NamedTuple):
    """An evaluation with compressed gradients, by its number: it adds the residuals of evaluation `taken` (0: none),
    and the next one may continue from this one, from `taken` or from `kept`."""

    evaluation: int
    taken: int
    kept: int


class GradientResiduals:
    """The remainders of compressing a member's gradients, which have `layout`, by the number of the evaluation that
    left them."""

    def __init__(self, compression: Compression, layout: Layout) -> None:
        self._compression, self._layout = compression, layout
        self._left: dict[int, torch.Tensor] = {}
        self._is_used = False

    def encode(self, gradients: Sequence[torch.Tensor], members: int, of: Round, samples: range) -> list[torch.Tensor]:
        """Encode this member's gradient, of these samples, one of `members`; return nothing if it is not finite, since
        it must then be sent uncompressed. A member without a share keeps its residual. Raises `DoesNotFit`."""
        self._is_used = True
        before = self._left.get(of.taken)
        self._left = {number: self._left[number] for number in (of.taken, of.kept) if number in self._left}
        if not gradients:
            if before is not None:
                self._left[of.evaluation] = before
            return []
        try:
            found = compress(self._compression, gradients[0], before, members)
        except DoesNotFit as error:
            error.samples = samples
            raise
        if found is not None and found.residual is not None:
            self._left[of.evaluation] = found.residual
        return [] if found is None else [found.code]

    def decode(self, code: torch.Tensor, members: int) -> torch.Tensor:
        """Decode the gradient of one of `members` members."""
        return self._compression.decode(code, members, self._layout.size, self._layout.sum_dtype)

    def after(self, evaluation: int) -> torch.Tensor | None:
        """Return the residual of an evaluation; None if there is none."""
        return self._left.get(evaluation)

    def restore(self, evaluation: int, of_all: Mapping[int, torch.Tensor], place: int, size: int) -> None:
        """Take over the saved residuals of all members, as the one at `place` of `size`: its own or, if the number of
        members has changed, an equal part of the sum."""
        if not of_all:
            return
        if len(of_all) <= size and max(of_all) < size:
            mine = of_all.get(place)
        else:
            mine = torch.stack([*of_all.values()]).sum(0) / size
        if mine is not None:
            self._left[evaluation] = mine.clone()

    def lost_with(self, name: str) -> None:
        """Warn that a member was lost, and its residuals with it."""
        if self._is_used and self._compression.keeps_residual:
            warnings.warn(
                f"{name} was lost together with its compression residuals; resume from a checkpoint to recover them",
                RuntimeWarning,
                stacklevel=2,
            )


def residuals_of(setup: Setup) -> GradientResiduals | None:
    """Return the residuals of a member; None if gradients are not compressed."""
    return None if setup.compression is None else GradientResiduals(setup.compression, setup.flat.layout)
