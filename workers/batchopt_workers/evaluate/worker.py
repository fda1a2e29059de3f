"""The arguments of the user's hooks: the worker that runs them, and the samples of the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Worker:
    """The process that runs a hook, as the hook sees it.

    `rank` counts from 0 to `world_size - 1`. `module` and `criterion` are the worker's own (None in precode, which runs
    before they arrive); the module's parameters are views of the shared X. `state` is a dict for the hook's own use,
    kept for the life of the worker.
    """

    rank: int
    world_size: int
    device: torch.device
    module: torch.nn.Module | None = None
    criterion: Callable[..., Any] | None = None
    state: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """The samples of one forward; `indices` are their positions in the batch or, if there are terms, in the batch of
    the term named `term`.

    A prehook may replace `inputs` and `targets`. `output` (returned by the module; None with `loss_fn`) and `loss`
    (returned by the criterion, as a float; for cross entropy with label smoothing and class weights of 0 the sum
    instead of the mean) are set for the posthook.
    """

    inputs: Any
    targets: Any
    options: Sequence[Any] | None
    indices: range
    output: Any = None
    loss: float | None = None
    term: str | None = None


Precode = Callable[[Worker], object]
Hook = Callable[[Worker, Sample], object]
