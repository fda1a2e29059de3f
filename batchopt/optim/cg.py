"""Nonlinear conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from batchopt.optim.algebra import add, dot, dots, scaled
from batchopt.optim.descent import Descent
from batchopt.optim.line import Point
from batchopt.optim.minimizer import Callback
from batchopt.optim.options import check_choice

# A direction along which f falls by less than this fraction of the steepest descent's slope is replaced by that one, as
# the two terms cancel: the "sufficient descent" of Gilbert and Nocedal.
SUFFICIENT = 0.01


class _Products:
    """The scalar products in the formulas: of the gradients g before and h after a step, y = h - g, and the direction d
    of the step."""

    def __init__(self, g: torch.Tensor, h: torch.Tensor, d: torch.Tensor, y: torch.Tensor) -> None:
        self.gg, self.hh, self.dd, self.yy, self.hy, self.dy, self.dh, self.dg = dots(
            (g, g), (h, h), (d, d), (y, y), (h, y), (d, y), (d, h), (d, g)
        )


def _fletcher_reeves(p: _Products) -> float:
    # else steps may become ever shorter: Powell, "Restart procedures for the conjugate gradient method", 1977
    return p.hh / p.gg if abs(p.hh - p.hy) < 0.2 * p.hh else 0.0


def _polak_ribiere(p: _Products) -> float:
    return max(p.hy / p.gg, 0.0)


def _hestenes_stiefel(p: _Products) -> float:
    return max(p.hy / p.dy, 0.0)


def _hager_zhang(p: _Products) -> float:
    return max(p.hy / p.dy - 2 * (p.yy / p.dy) * (p.dh / p.dy), 0.4 * p.dg / p.dd)


BETAS: dict[str, Callable[[_Products], float]] = {
    "fletcher-reeves": _fletcher_reeves,
    "polak-ribiere": _polak_ribiere,
    "hestenes-stiefel": _hestenes_stiefel,
    "hager-zhang": _hager_zhang,
}


class CG(Descent):
    """Nonlinear conjugate gradients: each direction is the steepest descent plus `beta` times the previous direction.

    Args:
        params, lr, max_iter, max_eval, tolerance_grad, tolerance_change, line_search_fn, callback: see `LBFGS`;
            max_iter is 200 by default.
        beta: `"hager-zhang"`, the default (Hager and Zhang, "A new conjugate gradient method with guaranteed descent
            and an efficient line search", SIAM Journal on Optimization 16, 2005, with the scale-invariant lower bound
            of "The limited memory conjugate gradient method", ibid. 23, 2013); `"polak-ribiere"`, at least 0 (Polak
            and Ribiere 1969; Gilbert and Nocedal 1992); `"hestenes-stiefel"`, at least 0 (Hestenes and Stiefel 1952);
            `"fletcher-reeves"` (Fletcher and Reeves, "Function minimization by conjugate gradients", The Computer
            Journal 7, 1964), restarted where two gradients are far from orthogonal (Powell 1977).

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
        beta: Literal["hager-zhang", "polak-ribiere", "hestenes-stiefel", "fletcher-reeves"] = "hager-zhang",
        callback: Callback | None = None,
    ) -> None:
        check_choice("beta", beta, tuple(BETAS))
        super().__init__(locals())

    def _make_room(self) -> None:
        super()._make_room()
        self._y: torch.Tensor | None = None

    _kept = (*Descent._kept, "direction", "beta", "decrease")

    def _aim(self, here: Point, out: torch.Tensor) -> None:
        memory = self._memory
        if "direction" in memory:
            add(scaled(here.gradient, -1.0, out), memory["direction"], memory["beta"], out=out)
        else:
            scaled(here.gradient, -1.0, out)

    def _learn(self, before: Point, after: Point, change: torch.Tensor) -> None:
        memory, direction = self._memory, self._direction
        if self._y is None:
            self._y = self._vector.empty()
        y = add(after.gradient, before.gradient, -1.0, out=self._y)
        products = _Products(before.gradient, after.gradient, direction, y)
        sound = products.dy > 0 and products.gg > 0 and products.dd > 0  # no square has underflowed
        beta = BETAS[self._group["beta"]](products) if sound else 0.0
        memory["beta"] = beta if beta * products.dh < (1 - SUFFICIENT) * products.hh else 0.0
        memory["decrease"] = dot(change, before.gradient)
        self._direction = memory["direction"] if "direction" in memory else self._vector.empty()
        memory["direction"] = direction

    def _forget(self) -> bool:
        return self._memory.pop("direction", None) is not None

    def _first(self, slope: float) -> float | None:
        """Return the step that promises the decrease of the last one (Nocedal and Wright, "Numerical Optimization",
        2006, equation 3.60)."""
        if "direction" not in self._memory:
            return None
        first: float = self._memory["decrease"] / slope
        return first
