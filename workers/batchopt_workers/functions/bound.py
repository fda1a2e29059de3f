"""A function of a module as a module, so that torch.func can call it with other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Bound(torch.nn.Module):
    """A function of a module and of other arguments, as a module that is called with the latter."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(self.module, *arguments)
