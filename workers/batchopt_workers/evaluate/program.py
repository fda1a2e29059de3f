"""The program that every worker evaluates, and the arguments of the hooks in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from batchopt_workers.evaluate.objective import LossFunction


@dataclass(frozen=True)
class Program:
    """The program that every worker evaluates. `loss_fns`: a function per term, None if the loss is the criterion's or
    the module's own.

    Hooks belong to it, because they may share objects with the module and the losses. `module_hooks` are those of all
    modules of a process. `graphs`: on a card, evaluations that repeat are recorded.
    """

    module: torch.nn.Module
    criterion: Any
    loss_fns: tuple[LossFunction | None, ...]
    seed: int
    prehook: Hook | None = None
    posthook: Hook | None = None
    module_hooks: Mapping[str, Any] = field(default_factory=dict)
    graphs: bool = True


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
