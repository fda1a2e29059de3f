"""Statistics of parameters, gradients and outputs of inner layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from batchopt.extending import check_callable, items_of, reals
from batchopt.optimizer import BatchOptimizer
from batchopt.training.triggers import read_interval

Statistic = Callable[[torch.Tensor], Any]


def norm_by_size(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm divided by the square root of the size: the typical magnitude of an element."""
    return float(reals(tensor).double().norm()) / math.sqrt(max(tensor.numel(), 1))


class Monitor:
    """Computes a statistic of each tensor whose name matches.

    Names are those of the module: `0.weight` is a parameter, `0.weight.grad` its gradient in the last evaluation, and
    `0.output` the output of a layer (a part without parts) for the batch with the parameters after the step: one
    forward on the workers. `values` has the numbers by name, and they are included in lines of logs.

    Args:
        pattern: a regular expression that the full name must match. Default: all. Layers that do not return one row per
            sample cannot be monitored, and must not match.
        statistic: computes a number from a tensor. Default: its norm divided by the square root of its size.
        every: a number of iterations, or a trigger such as `EveryEpoch(0.5)`.
    """

    def __init__(self, pattern: str = ".*", statistic: Statistic = norm_by_size, every: Any = 1) -> None:
        self._pattern = re.compile(pattern)
        check_callable("statistic", statistic, ("tensor",))
        self._statistic = statistic
        self.interval = read_interval("every", every)
        self.values: dict[str, float] = {}

    def look(self, opt: BatchOptimizer) -> dict[str, float]:
        """Return the current numbers, between two steps of `opt`, and store them in `values`."""
        found = {name: float(self._statistic(tensor)) for name, tensor in self._tensors(opt)}
        self.values = found
        return found

    def _tensors(self, opt: BatchOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in opt.module.named_parameters():
            if self._pattern.fullmatch(name):
                yield name, parameter.detach()
            if parameter.grad is not None and self._pattern.fullmatch(f"{name}.grad"):
                yield f"{name}.grad", parameter.grad.detach()
        parts = [name for name, part in opt.module.named_modules() if name and not any(part.children())]
        layers = [name for name in parts if self._pattern.fullmatch(f"{name}.output")]
        if layers:
            yield from _leaves("", opt.collect(layers=layers))


def _leaves(path: str, found: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the collected tensors, by the names of layers, or of terms and layers."""
    if isinstance(found, torch.Tensor):
        yield f"{path}.output", found
        return
    for key, item in items_of(found):
        yield from _leaves(f"{path}.{key}" if path else str(key), item)
