"""Collecting the gradients of a backward into a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from batchopt_workers import faults
from batchopt_workers.rows import Row

# Elements of all gradients together from which on each is collected as soon as it is there: more are not in the
# processor's cache any more when the backward is over.
LARGE = 2**18


class GradientCollector:
    """Adds the parameters' gradients, times `weight`, to a row; in the row's precision, which is at least single.

    A first gradient overwrites what the row held: cheaper than zeroing the row and accumulating there. Entered, it
    collects each gradient when the backward has made it, which frees its memory for the next one.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], row: Row, weight: float, used: bytearray, chunk: int
    ) -> None:
        self._parameters, self._row = parameters, row
        self._weight, self._used, self._chunk = weight, used, chunk
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        if len(self._row.gradient) < LARGE:
            return
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad and not getattr(parameter, "_post_accumulate_grad_hooks", None):  # the user's
                hook = partial(self._collect, i)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def collect(self) -> None:
        """Collect what is there."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._collect(i, parameter)

    @torch.no_grad()
    def _collect(self, i: int, parameter: torch.Tensor) -> None:
        faults.point("worker.collect", self._chunk)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        view = self._row.views[i]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._used[i]:
            view.add_(gradient, alpha=self._weight)
        elif self._weight == 1.0:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self._weight, out=view)
        else:
            view.copy_(gradient).mul_(self._weight)
        self._used[i] = 1


@contextmanager
def grads_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have no `.grad` inside, and afterwards those of before."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
