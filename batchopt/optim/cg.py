"""Nonlinear conjugate gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from batchopt.optim.algebra import add, dot, dots, scaled
from batchopt.optim.descent import Descent
from batchopt.optim.line import Point
from batchopt.optim.minimizer import Callback

# A direction along which f falls by less than this fraction of the steepest descent's slope is replaced by that one, as
# the two terms cancel: the "sufficient descent" of Gilbert and Nocedal.
SUFFICIENT = 0.01


class CG(Descent):
    """Nonlinear conjugate gradients: each direction is the steepest descent plus a multiple of the previous direction.

    Args:
        params, lr, max_iter, max_eval, tolerance_grad, tolerance_change, line_search_fn, callback: see `LBFGS`;
            max_iter is 200 by default.

    The multiple is that of Hager and Zhang, "A new conjugate gradient method with guaranteed descent and an efficient
    line search", SIAM Journal on Optimization 16, 2005, with the scale-invariant lower bound of "The limited memory
    conjugate gradient method", ibid. 23, 2013.

    It needs the memory of a few parameter vectors, and more evaluations than `LBFGS`. `result` and the final parameters
    are as described there. Raises `ValueError` or `TypeError` for options that cannot work.

    >>> points, model = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None], torch.nn.Linear(1, 1).double()
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer="cg") as opt:
    ...     loss = opt.step(points, 2 * points + 1)
    >>> round(model.weight.item(), 4), round(model.bias.item(), 4)
    (2.0, 1.0)
    """

    flat = 0.1  # conjugacy needs line searches that end near the minimum

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        max_iter: int | None = 200,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        line_search_fn: Literal["strong_wolfe", "armijo"] | None = "strong_wolfe",
        *,
        callback: Callback | None = None,
    ) -> None:
        super().__init__(locals())

    def _make_room(self) -> None:
        super()._make_room()
        self._y = self._vector.empty()

    _knowledge = "direction"
    _kept = (*Descent._kept, "direction", "beta", "decrease")

    def _aim(self, here: Point, out: torch.Tensor) -> None:
        memory = self._memory
        if self._knows:
            add(scaled(here.gradient, -1.0, out), memory["direction"], memory["beta"], out=out)
        else:
            scaled(here.gradient, -1.0, out)

    def _learn(self, before: Point, after: Point, change: torch.Tensor) -> None:
        memory, direction = self._memory, self._direction
        y = add(after.gradient, before.gradient, -1.0, out=self._y)
        hh, dd, yy, hy, dy, dh, dg = dots(
            (after.gradient, after.gradient),
            (direction, direction),
            (y, y),
            (after.gradient, y),
            (direction, y),
            (direction, after.gradient),
            (direction, before.gradient),
        )
        beta = 0.0
        if dy > 0 and dd > 0:  # no square has underflowed
            beta = max(hy / dy - 2 * (yy / dy) * (dh / dy), 0.4 * dg / dd)
        memory["beta"] = beta if beta * dh < (1 - SUFFICIENT) * hh else 0.0
        memory["decrease"] = dot(change, before.gradient)
        self._direction = memory["direction"] if self._knows else self._vector.empty()
        memory["direction"] = direction

    def _forget(self) -> None:
        self._memory.pop("direction", None)

    def _first(self, slope: float) -> float | None:
        """Return the step that promises the decrease of the last one (Nocedal and Wright, "Numerical Optimization",
        2006, equation 3.60)."""
        return self._memory["decrease"] / slope if self._knows else None
