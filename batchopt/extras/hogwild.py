"""Asynchronous training in one call: Hogwild."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from batchopt.optimizer import BatchOptimizer

if TYPE_CHECKING:
    from batchopt.extending import HogwildResult


def hogwild(
    module: torch.nn.Module,
    criterion: Callable[..., Any] | None,
    data: Any,
    *,
    optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
    batch_size: int,
    parallelize: int | Literal["auto"] = 1,
    epochs: int = 1,
    shuffle: bool = True,
    **settings: Any,
) -> HogwildResult:
    """Let `parallelize` workers step on mini-batches of `data` and on shared parameters, without waiting for each
    other.

    module, criterion and `settings` are as for `BatchOptimizer`, which this function opens and closes; the other
    arguments, the result and the exceptions as for `BatchOptimizer.hogwild`. For more than one call use that method,
    which keeps the workers.

    >>> x, model = torch.linspace(-1, 1, 100)[:, None], torch.nn.Linear(1, 1)
    >>> sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    >>> batchopt.hogwild(model, torch.nn.MSELoss(), (x, 2 * x), optimizer=sgd, batch_size=10, epochs=3)
    HogwildResult(losses of 30 mini-batches)
    """
    with BatchOptimizer(module, criterion, optimizer=None, parallelize=parallelize, **settings) as opt:
        return opt.hogwild(data, optimizer, batch_size=batch_size, epochs=epochs, shuffle=shuffle)
