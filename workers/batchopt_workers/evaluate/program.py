"""The program that every worker evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from batchopt_workers.evaluate.objective import LossFunction
from batchopt_workers.evaluate.worker import Hook


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
