"""How most tests begin: an optimizer without an optimization, on a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from batchopt import BatchOptimizer
from tests.workloads import Workload


def loaded(module: nn.Module, criterion: Callable[..., Any] | None, *batch: Any, **options: Any) -> BatchOptimizer:
    """Evaluates the module on this batch; only an optimizer that is given steps."""
    opt = BatchOptimizer(module, criterion, **{"optimizer": None, **options})
    opt.load(*batch)
    return opt


def on(work: Workload, **options: Any) -> BatchOptimizer:
    """Evaluates the workload's module on its batch."""
    return loaded(work.module, work.criterion, work.inputs, work.targets, **options)
