"""Steps of an optimizer in the worker, on parameters that all workers write: Hogwild."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from batchopt_workers.batch.batch import Part, Piece
from batchopt_workers.functions.task import PieceContext
from batchopt_workers.wire.structures import all_finite

# Creates an optimizer for parameters.
Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Hogwild:
    """Steps on each mini-batch of a piece, whose inputs are the numbers of samples and of their mini-batches. Each
    worker creates its own optimizer at the first step. Returns for each sample the loss before the step, and the
    worker's rank.

    If the loss or a gradient is not finite, neither this step nor any later one is made: the loss is NaN, and in later
    ones the rank is -1.
    """

    def __init__(self, data: Part, factory: Factory) -> None:
        self._data, self._factory = data, factory
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_over = False

    def __call__(self, piece: Piece, context: PieceContext) -> tuple[torch.Tensor, torch.Tensor]:
        if self._optimizer is None:
            self._optimizer = self._factory([p for p in context.parameters if p.requires_grad])  # type: ignore[misc]
        samples, batches = piece.inputs
        _, counts = batches.unique_consecutive(return_counts=True)
        losses, ranks = [], []
        for indices in samples.split(counts.tolist()):
            ranks.append(-1 if self._is_over else context.worker.rank)
            if self._is_over:
                losses.append(torch.nan)
                continue
            (picked,) = self._data.picked(indices.tolist()).pieces(0, len(indices))
            piece.inputs, piece.targets = picked.inputs, picked.targets
            self._optimizer.zero_grad()
            loss = context.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            self._is_over = not (math.isfinite(value) and _are_finite(context.parameters))
            if not self._is_over:
                self._optimizer.step()
            losses.append(torch.nan if self._is_over else value)
        found = torch.tensor(losses, dtype=torch.float64).repeat_interleave(counts)
        return found, torch.tensor(ranks).repeat_interleave(counts)


def _are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Tell whether their gradients are finite."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return all(all_finite((gradient._values() if gradient.is_sparse else gradient).flatten()) for gradient in found)
