"""The weight in f of the loss of some samples, and what each adds to the divisor of a mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# The name of the samples' weights among the attributes of a part that have a row for each sample.
SAMPLE_WEIGHT = "sample_weight"


@dataclass(frozen=True)
class Weighting:
    """The meaning of a loss of `size` samples: their `"sum"`, or their `"mean"`.

    A mean divides by the sum of the samples' denominators: 1 each, or given by `running` (shape `(size + 1,)`, float64:
    the sum over the samples before each). `divided_once`: the losses of pieces are sums, and only the total is divided;
    so samples whose denominators are 0 may contribute to the loss.
    """

    reduction: str
    size: int
    running: torch.Tensor | None = None
    divided_once: bool = False

    @property
    def divisor(self) -> float:
        """The divisor in the loss of all samples: their number or the sum of their denominators; 1 for a sum."""
        if self.reduction == "sum":
            return 1.0
        return float(self.size) if self.running is None else float(self.running[-1].item())

    def of(self, start: int, stop: int) -> float:
        """Return the weight of the loss of samples `start` up to `stop`: exactly 1 for all of them, unless
        `divided_once`; NaN if all denominators are 0."""
        if self.reduction == "sum":
            return 1.0
        if self.divided_once:
            return 1 / self.divisor if self.divisor else float("nan")
        if self.running is None:
            return (stop - start) / self.size
        total = self.running[-1].item()
        return (self.running[stop].item() - self.running[start].item()) / total if total else float("nan")

    def picked(self, samples: Sequence[int]) -> Weighting:
        """Return the weighting of these samples alone."""
        running = self.running
        if running is not None:
            rows = torch.tensor(samples, dtype=torch.long)
            each = running[rows + 1] - running[rows]
            running = torch.cat([each.new_zeros(1), each.cumsum(0)])
        return replace(self, size=len(samples), running=running)


def weighted(elements: torch.Tensor, sample_weight: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the loss of samples with weights. `sample_weight`: shape `(samples,)`, and `elements` has a row for each;
    or no dimension, if `elements` are those of one sample.

    With the reduction `"sum"` the sum of the weighted sums of the rows; `"mean"`, the mean of the rows' means, and
    `"batchmean"`, of their sums. NaN if all weights are 0. Raise `ValueError` if the rows do not match.
    """
    weights = sample_weight.double().reshape(-1)
    if sample_weight.dim() and elements.shape[:1] != sample_weight.shape:
        raise ValueError(
            f"samples have weights, and the loss of {len(sample_weight)} samples has shape {tuple(elements.shape)} "
            "before it is reduced: its first dimension has to be the samples"
        )
    rows = elements.reshape(len(weights), -1)
    each = rows.mean(1) if reduction == "mean" else rows.sum(1)
    shares = weights if reduction == "sum" else weights / weights.sum()
    shares = shares.to(elements.device, torch.promote_types(elements.dtype, torch.float32))
    return (each * shares).sum()


Denominators = Callable[[Any, Any], Any]


def class_denominators(classes: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """Return each sample's denominator (shape `(samples,)`, float64) in the mean of a cross entropy or negative log
    likelihood of these classes (shape `(samples, ...)`): the weights of those that are not `ignored`."""
    with torch.no_grad():
        classes = classes.long().cpu()
        counted = classes != ignored
        each = counted.double()
        if weight is not None:
            each = weight.double().cpu()[torch.where(counted, classes, 0)] * each
        return each.reshape(len(each), -1).sum(1)


@dataclass(frozen=True)
class GivenDenominators:
    """The denominators that the user's function returns for the samples of a chunk."""

    function: Denominators

    def __call__(self, module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        return torch.as_tensor(self.function(inputs, targets)).detach()


@dataclass(frozen=True)
class ClassDenominators:
    """The denominators of the samples of a chunk by `class_denominators`; NaN if the targets are not classes."""

    weight: torch.Tensor
    ignored: int

    def __call__(self, module: torch.nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        if not isinstance(targets, torch.Tensor):
            raise TypeError(f"class weights need targets that are a tensor; got {type(targets).__name__}")
        if targets.is_floating_point():
            return torch.full((len(targets),), torch.nan, dtype=torch.float64)
        return class_denominators(targets, self.weight, self.ignored)
