"""The samples' contributions to the divisor of a mean, determined by the process that has read their targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
