"""Samples that count more than others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchopt._data.denominators import is_torchs_own
from batchopt_workers.data.denominators import Denominators


@dataclass(frozen=True)
class Weighted:
    """The inputs of a batch, or of a term, whose samples have weights: `opt.step(Weighted(inputs, weights), targets)`.

    Args:
        inputs: of any form that `BatchOptimizer.load` takes.
        sample_weight: shape `(samples,)`: finite numbers >= 0, not all 0. A mean is then the sum of weighted losses of
            samples divided by the sum of the weights; of classes with weights, by the sum of both weights' products; a
            sum is the sum of weighted losses. A sample of weight 0 is evaluated all the same, and has to have a finite
            loss.

    For the losses of `torch.nn` but `CTCLoss`, and for residuals, robust losses included. `load` raises `ValueError`
    for any other loss, whose samples' losses nobody knows: have the weights among the targets there, and
    `denominators`.
    """

    inputs: Any
    sample_weight: Any


def read_weights(sample_weight: Any, samples: int) -> torch.Tensor:
    """As float64, shape `(samples,)`. Raises `TypeError` or `ValueError`."""
    needed = f"`sample_weight` must be {samples} finite numbers >= 0, one a sample"
    try:
        has_dtype = hasattr(sample_weight, "dtype")  # a list of numbers would be rounded to torch's default
        weights = torch.as_tensor(sample_weight, dtype=None if has_dtype else torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{needed}; got {type(sample_weight).__name__}: {error}") from error
    if weights.is_complex():
        raise TypeError(f"{needed}; got complex ones")
    if weights.shape != (samples,):
        raise ValueError(f"{needed}; got shape {tuple(weights.shape)}")
    weights = weights.to("cpu", torch.float64, copy=True)
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.any()):
        raise ValueError(f"{needed}, not all 0; got {weights[~(weights > 0)][:3].tolist()} among them")
    return weights


def refuse_weights(criterion: Any, is_of_residuals: bool, denominators: Denominators | None, is_read: bool) -> None:
    """Raise `ValueError` for a loss whose samples cannot have weights; `is_read`: where workers read the targets."""
    of_torch = is_torchs_own(criterion) and not isinstance(criterion, torch.nn.CTCLoss)
    if not (is_of_residuals or of_torch) or denominators is not None:
        raise ValueError(
            "samples can have weights where their losses are known: with a criterion of torch.nn (not CTCLoss) or "
            "residuals, without `denominators`. Of any other loss put the weights into the targets, return "
            "(weights * losses).sum() / weights.sum(), and pass denominators=lambda inputs, targets: the weights"
        )
    if is_read and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            "samples of a Dataset cannot have weights where the criterion has weights, too: what the mean divides by "
            "is not known before all targets were read; pass tensors"
        )
