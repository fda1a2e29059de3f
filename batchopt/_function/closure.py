"""f of the loaded batch as optimizers ask for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchopt._function.function import BatchFunction
from batchopt._function.least_squares import Normal, acceleration, gauss_newton_product, normal


class Closure:
    """A closure: `closure()` evaluates f and df/dX of the loaded batch. Where f is a sum of squares it has the normal
    equations, too, which `LevenbergMarquardt` asks for."""

    def __init__(self, function: BatchFunction, evaluate: Callable[[], torch.Tensor]) -> None:
        """`evaluate` the function by this."""
        self._function, self._evaluate = function, evaluate

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The module's trainable ones, in the order in which X has them."""
        return self._function.subject.parameters

    def __call__(self) -> torch.Tensor:
        """As `BatchOptimizer.evaluate`."""
        return self._evaluate()

    def normal(self, limit: int) -> Normal:
        """As `BatchOptimizer.normal`."""
        return normal(self._function, limit)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """As `BatchOptimizer.gauss_newton`."""
        return gauss_newton_product(self._function, v)

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        """JᵀW times the second derivative of the residuals along `v`: shape `(n,)`, X's dtype."""
        return acceleration(self._function, v)
