"""Error-feedback residuals: what compression has left of one member's gradients, to be added to its next one.

1-bit and 2-bit compression with error feedback: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient
descent and its application to data-parallel distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from batchopt._mapreduce.compression import Compression, compress


class Round(NamedTuple):
    """An evaluation with compressed gradients, by its number: it goes on from what `taken` has left (0: nothing), and
    the next one may go on from this one, from `taken` or from `kept`."""

    evaluation: int
    taken: int
    kept: int


class GradientResiduals:
    """This member's residuals, by the number of the evaluation that left them; gradients have `size` elements."""

    def __init__(self, compression: Compression, size: int, dtype: torch.dtype) -> None:
        self._compression, self._size, self._dtype = compression, size, dtype
        self._left: dict[int, torch.Tensor] = {}

    def encode(self, gradient: torch.Tensor, members: int, of: Round) -> torch.Tensor | None:
        """Encode this member's gradient, which is one of `members`; None for what is not finite, which has to be
        seen as it is. Raises `DoesNotFit`."""
        self._left = {number: self._left[number] for number in (of.taken, of.kept) if number in self._left}
        found = compress(self._compression, gradient, self._left.get(of.taken), members)
        if found is not None and found.residual is not None:
            self._left[of.evaluation] = found.residual
        return None if found is None else found.code

    def decode(self, code: torch.Tensor, members: int) -> torch.Tensor:
        """Decode the gradient of one of `members` members."""
        return self._compression.decode(code, members, self._size, self._dtype)

    def pass_by(self, of: Round) -> None:
        """This member has no share of that evaluation: its residual waits."""
        if of.taken in self._left:
            self._left[of.evaluation] = self._left[of.taken]

    def after(self, evaluation: int) -> torch.Tensor | None:
        """Return the residual of an evaluation; None if there is none."""
        return self._left.get(evaluation)

    def restore(self, evaluation: int, of_all: Mapping[int, torch.Tensor], place: int, size: int) -> None:
        """Take what `size` members had when this one is at `place`: its own or, where they are as many as were saved no
        more, an equal part of the sum."""
        if not of_all:
            return
        if len(of_all) <= size and max(of_all) < size:
            mine = of_all.get(place)
        else:
            mine = torch.stack([*of_all.values()]).sum(0) / size
        if mine is not None:
            self._left[evaluation] = mine.clone()
