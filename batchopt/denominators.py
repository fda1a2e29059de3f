"""What the mean of a loss divides by: f is the sum over all samples divided by the sum over all denominators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from batchopt_workers.batch import Batch, Columns

_REDUCTIONS = ("mean", "sum")


def resolve_reduction(reduction: str | None, criterion: Any) -> str:
    """`"mean"` or `"sum"`: as given, else the criterion's own, else the mean.

    Raises `ValueError` for a criterion that does not reduce, and for any other word.
    """
    own = getattr(criterion, "reduction", None)
    if own == "none":
        raise ValueError("`criterion` has reduction='none': use reduction='mean' or 'sum', the loss must be a scalar")
    if reduction is None:
        return "sum" if own == "sum" else "mean"
    if reduction not in _REDUCTIONS:
        raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}")
    if own in _REDUCTIONS and own != reduction:
        raise ValueError(f"`reduction` is {reduction!r} but the criterion's own is {own!r}: leave `reduction` out")
    return reduction


def sample_weights(criterion: Any, batch: Batch) -> np.ndarray | None:
    """Each sample's part of the denominator, float64; None where all count the same.

    Cross entropy and negative log likelihood divide by the class weights of the targets that are not ignored.
    """
    if not isinstance(criterion, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)) or not isinstance(
        batch.targets, Columns
    ):
        return None
    target = batch.targets.data
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    with torch.no_grad():
        counted = target != criterion.ignore_index
        if criterion.weight is None and bool(counted.all()):
            return None
        if criterion.weight is None:
            each = counted.double()
        else:
            each = criterion.weight.double()[torch.where(counted, target, 0)] * counted
        weights: np.ndarray = each.reshape(batch.size, -1).sum(1).cpu().numpy()
        return weights
