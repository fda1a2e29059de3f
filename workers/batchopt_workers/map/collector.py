"""Collecting the gradients of a backward into a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from batchopt_workers.map.sums import Row
from batchopt_workers.process import faults

# Total elements of all gradients from which each one is collected as soon as it exists: they would no longer be in the
# processor's cache at the end of the backward.
LARGE = 2**18


def collect(
    parameters: Iterable[tuple[int, torch.Tensor]], row: Row, weight: float, used: bytearray, chunk: int
) -> None:
    """Add the gradients of these parameters (each given with its index) times `weight` to a row, in the row's
    precision, which is at least single, and clear them. Call it in a backward, or with gradients disabled.

    A first gradient overwrites the row: cheaper than zeroing the row and accumulating there.
    """
    views = row.views
    for i, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if faults.hook is not None:
            faults.point("worker.collect", chunk)
        parameter.grad = None
        view = views[i]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if used[i]:
            view.add_(gradient, alpha=weight)
        elif weight == 1.0:
            view.copy_(gradient)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, weight, out=view)
        else:
            view.copy_(gradient).mul_(weight)
        used[i] = 1


def is_large(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether `collecting` is worthwhile."""
    return sum(parameter.numel() for parameter in parameters) >= LARGE


@contextmanager
def collecting(
    parameters: Sequence[torch.Tensor], row: Row, weight: float, used: bytearray, chunk: int
) -> Iterator[None]:
    """`collect` each gradient as soon as the backward in the body has made it, which frees its memory for the next
    one."""
    handles = []
    try:
        for i, parameter in enumerate(parameters):
            if parameter.requires_grad and not getattr(parameter, "_post_accumulate_grad_hooks", None):  # the user's
                handles.append(
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda made, i=i: collect(((i, made),), row, weight, used, chunk)
                    )
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def grads_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Clear all `.grad` for the body, and restore them afterwards."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
