"""Numbers of a training: means, and what can be written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Mean:
    """The mean of losses, weighed by samples."""

    def __init__(self) -> None:
        self._sum, self._samples = 0.0, 0

    def add(self, loss: float, samples: int) -> None:
        """Take in the loss of a batch."""
        self._sum += loss * samples
        self._samples += samples

    def take(self) -> dict[str, float]:
        """The mean, as `loss`, if there is one; it begins anew."""
        found = {"loss": self._sum / self._samples} if self._samples else {}
        self._sum, self._samples = 0.0, 0
        return found

    def state_dict(self) -> list[float]:
        """The sum so far, and of how many samples."""
        return [self._sum, self._samples]

    def load_state_dict(self, state: list[float]) -> None:
        """Go on from there."""
        self._sum, self._samples = state[0], int(state[1])


def writable(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers."""
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


def learning_rate(optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """`lr` of the first group of parameters, if there is one."""
    rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
    return {} if rate is None else {"lr": float(rate)}
