"""Steps of an optimizer in the worker, on parameters that all workers write: Hogwild."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchopt_workers.batch import Columns, Part, Piece, Samples
from batchopt_workers.items import Items
from batchopt_workers.structures import map_tensors
from batchopt_workers.task import Surroundings

# Makes an optimizer of parameters.
Factory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


class Hogwild:
    """A step on each mini-batch of a piece, whose inputs are the numbers of samples, and that of the mini-batch that
    each belongs to. Each worker makes an optimizer of its own, with the first step. Returns for each sample the loss
    before the step, and the worker's rank."""

    def __init__(self, data: Part, factory: Factory) -> None:
        self._data, self._factory = data, factory
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, piece: Piece, around: Surroundings) -> tuple[torch.Tensor, torch.Tensor]:
        if self._optimizer is None:
            self._optimizer = self._factory([p for p in around.parameters if p.requires_grad])  # type: ignore[misc]
        samples, batches = piece.inputs
        _, counts = batches.unique_consecutive(return_counts=True)
        losses = []
        for indices in samples.split(counts.tolist()):
            piece.inputs, piece.targets = gathered(self._data, indices)
            self._optimizer.zero_grad()
            loss = around.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            losses.append(loss.item())
        found = torch.tensor(losses, dtype=torch.float64).repeat_interleave(counts)
        return found, torch.full_like(samples, around.worker.rank)


def gathered(data: Part, indices: torch.Tensor) -> tuple[Any, Any]:
    """Inputs and targets (or None) of these samples."""
    inputs, targets = data.inputs, data.targets
    if isinstance(inputs, Items):
        assert data.collate is not None
        return inputs.pick(indices.tolist(), data.collate)
    if isinstance(inputs, Columns):
        found = map_tensors(lambda tensor: tensor[indices], inputs.data)
        return found, None if targets is None else map_tensors(lambda tensor: tensor[indices], targets.data)
    assert isinstance(inputs, Samples) and data.collate is not None
    some = [inputs.sample(index) for index in indices.tolist()]
    if targets is None:
        return data.collate(some), None
    pairs = list(zip(some, [targets.sample(index) for index in indices.tolist()], strict=True))
    collated, its_targets = data.collate(pairs)
    return collated, its_targets
