"""Training without waiting, in one call: Hogwild."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from batchopt._function.hogwild import HogwildResult
from batchopt.optimizer import BatchOptimizer
from batchopt_workers.tasks.hogwild import Factory


def hogwild(
    module: torch.nn.Module,
    criterion: Callable[..., Any] | None,
    data: Any,
    *,
    optimizer: Factory,
    batch_size: int,
    parallelize: int | str = 1,
    epochs: int = 1,
    shuffle: bool = True,
    **settings: Any,
) -> HogwildResult:
    """Let `parallelize` workers step on mini-batches of `data` and on the same parameters, without waiting.

    module, criterion and `settings` are as for `BatchOptimizer`, which this opens and closes; the other arguments, what
    is returned and what is raised as for `BatchOptimizer.hogwild`. Where more than one call is made, that one keeps the
    workers.
    """
    with BatchOptimizer(module, criterion, optimizer=None, parallelize=parallelize, **settings) as opt:
        return opt.hogwild(data, optimizer, batch_size=batch_size, epochs=epochs, shuffle=shuffle)
