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
    """A step on the samples whose numbers are the piece's inputs. Each worker makes an optimizer of its own, with the
    first step. Returns the loss before the step, and the worker's rank, for each sample."""

    def __init__(self, data: Part, factory: Factory) -> None:
        self._data, self._factory = data, factory
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, piece: Piece, around: Surroundings) -> tuple[torch.Tensor, torch.Tensor]:
        if self._optimizer is None:
            self._optimizer = self._factory([p for p in around.parameters if p.requires_grad])  # type: ignore[misc]
        indices = piece.inputs
        piece.inputs, piece.targets = gathered(self._data, indices)
        self._optimizer.zero_grad()
        loss = around.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        losses = torch.full((len(indices),), loss.item(), dtype=torch.float64)
        return losses, torch.full((len(indices),), around.worker.rank)


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
