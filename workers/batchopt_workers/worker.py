"""The arguments of the user's hooks: the worker that they run in, and the samples of the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Worker:
    """The process that a hook runs in, as the hook sees it.

    `rank` counts from 0 to `world_size - 1`. `module` and `criterion` are the worker's own (None in precode, which runs
    before they arrive); the module's parameters are views of the shared X. `state` is a dict of the hook's
    own, kept for as long as the worker lives.
    """

    rank: int
    world_size: int
    device: torch.device
    module: torch.nn.Module | None = None
    criterion: Callable[..., Any] | None = None
    state: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """The samples of one forward: `indices` are their positions in the batch or, where there are terms, in that of
    their `term`, whose name it is.

    A prehook may put other `inputs` and `targets` in place. `output` (what the module returned; None with `loss_fn`)
    and `loss` (what the criterion returned, a float; of cross entropy with label smoothing and class weights of 0 the
    sum, in place of the mean) are there for the posthook.
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
