"""f and df/dX of data that comes in several batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from batchopt._function.function import BatchFunction
from batchopt._function.prepared import whole
from batchopt.backends.base import Prepared
from batchopt_workers.map.weighting import Weighting


class Total:
    """The float64 sum over batches, in their order; a mean is weighted by its divisor."""

    def __init__(self, x: torch.Tensor) -> None:
        """Start at zero, for gradients like `x`: shape `(n,)`."""
        self._loss, self._divisor = 0.0, 0.0
        self._gradient = torch.zeros_like(x, dtype=torch.float64)
        self._dtype = x.dtype

    def add(self, loss: float, gradient: torch.Tensor, weighting: Weighting) -> None:
        """Add f and df/dX (shape `(n,)`) of a batch with this weighting."""
        self._loss += weighting.divisor * loss
        self._gradient.add_(gradient, alpha=weighting.divisor)
        self._divisor = 1.0 if weighting.reduction == "sum" else self._divisor + weighting.divisor

    def whole(self) -> tuple[float, torch.Tensor]:
        """Return f and df/dX (in the dtype of `x`) of all batches. Raises `ValueError` if no sample counts."""
        if not self._divisor:
            raise ValueError("there is no sample that counts: no batch, or the denominators of all samples are 0")
        return self._loss / self._divisor, (self._gradient / self._divisor).to(self._dtype)


def full_gradient(
    function: BatchFunction, data: Iterable[Any], evaluate: Callable[[], torch.Tensor]
) -> tuple[float, torch.Tensor]:
    """Return f and df/dX of all batches of `data` together; documented at `BatchOptimizer.full_gradient`."""
    function.check_exact("full_gradient()")
    subject, total = function.subject, Total(function.subject.x)
    if function.terms is not None and len(function.terms) > 1:
        raise ValueError(
            "full_gradient needs an objective of one term: the means of several divide by different denominators, "
            f"and there are {len(function.terms)}; load all data as one batch and call evaluate()"
        )

    def add(prepared: Prepared) -> None:
        prepared = function.weighed(prepared)
        (part,) = prepared.batch.parts
        if _counts(part.weighting):
            function.begin(prepared)
            total.add(evaluate().item(), subject.gradient, part.weighting)
            function.drop_changes()

    with function.apart("full_gradient()", counted=True):
        for batch in function.prepared(whole(data)):
            add(batch.take(function))
        found = total.whole()
    subject.gradient.copy_(found[1])
    subject.show_gradients()
    return found


def _counts(weighting: Weighting) -> bool:
    """Tell whether any sample counts. Raises `ValueError` if none does and the batch nevertheless has a loss."""
    if weighting.divided_once and not weighting.divisor:
        raise ValueError(
            "the class weights of all targets of a batch are 0, and with label smoothing it has a loss all the same, "
            "which no mean of it says: make the batches larger, or leave those samples out"
        )
    return bool(weighting.divisor)
