"""Weights of samples."""

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
        sample_weight: shape `(samples,)`: finite numbers >= 0, not all 0. A mean is then the sum of the samples'
            weighted losses divided by the sum of the weights; with class weights, by the sum of the products of both; a
            sum is the sum of weighted losses. A sample of weight 0 is still evaluated, and must have a finite loss.

    For the losses of `torch.nn` except `CTCLoss`, and for residuals, including robust losses. `load` raises
    `ValueError` for any other loss, since the losses of its samples are unknown: put the weights into the targets
    there, and pass `denominators`.
    """

    inputs: Any
    sample_weight: Any


def read_weights(sample_weight: Any, samples: int) -> torch.Tensor:
    """Return the weights as float64, shape `(samples,)`. Raise `TypeError` or `ValueError`."""
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
    """Raise `ValueError` for a loss whose samples cannot have weights; `is_read`: workers read the targets."""
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
