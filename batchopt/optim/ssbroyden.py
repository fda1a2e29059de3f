"""Self-scaled Broyden: a quasi-Newton method with a full matrix, for some thousand parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from batchopt.optim.algebra import add, dot, dots, multiply, update, update_and_multiply
from batchopt.optim.curvature import LEAST
from batchopt.optim.descent import Descent
from batchopt.optim.line import Point
from batchopt.optim.minimizer import Callback, Search

# If steps are on average shorter than this fraction of the direction, the matrix is too large.
SHORT = 0.1
# The weight of the last step in that average, which is geometric.
LAST = 0.1


class _Update(NamedTuple):
    """An update of the matrix: to `scale` times itself, plus `left.T @ right` (shapes `(2, n)`)."""

    scale: float
    left: torch.Tensor
    right: torch.Tensor


class SSBroyden(Descent):
    """Self-scaled Broyden, with the inverse Hessian as one matrix of n x n elements for n parameters.

    For some thousand parameters, as in physics-informed networks, it reaches losses and errors that `LBFGS` does not,
    in fewer evaluations; float64 is advised. It needs the memory of the matrix (n = 3,000: 72 MB), and reads it twice
    per iteration.

    Args:
        params, lr, max_iter, max_eval, tolerance_grad, tolerance_change, line_search_fn, when_data_change, callback:
            see `LBFGS`; max_iter is 200 by default.

    Each update is of Broyden's family, scaled, with the factors of Al-Baali and Khalfan, "A wide interval for efficient
    self-scaling quasi-Newton algorithms", Optimization Methods and Software 20, 2005, as proposed for physics-informed
    networks by Urban, Stefanou and Pons, "Unveiling the optimization process of physics informed neural networks",
    Journal of Computational Physics 523, 2025. These factors can only enlarge the matrix, except along the direction of
    a step. So if f is more curved than where a run began, and line searches end at less than a tenth of the direction
    for about ten iterations, the matrix is multiplied by their average step.

    `result` and the final parameters are as described for `LBFGS`. Raises `ValueError` or `TypeError` for options that
    cannot work.

    >>> points, model = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None], torch.nn.Linear(1, 1).double()
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer="ssbroyden") as opt:
    ...     loss = opt.step(points, 2 * points + 1)
    >>> round(model.weight.item(), 4), round(model.bias.item(), 4)
    (2.0, 1.0)
    """

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
        when_data_change: Literal["forget", "keep"] = "forget",
        callback: Callback | None = None,
    ) -> None:
        super().__init__(locals())

    _knowledge = "inverse"
    _kept = (*Descent._kept, "inverse", "pace")

    def _make_room(self) -> None:
        super()._make_room()
        # Within a step the matrix lags by one update, which is applied when the next direction reads the matrix.
        self._update: _Update | None = None

    def _aim(self, here: Point, out: torch.Tensor) -> None:
        inverse = self._memory.get("inverse")
        due, self._update = self._update, None
        if inverse is None:
            torch.neg(here.gradient, out=out)
        elif due is None:
            multiply(inverse, here.gradient, out=out).neg_()
        else:
            update_and_multiply(inverse, *due, here.gradient, out=out).neg_()

    def _catch_up(self) -> None:
        """Apply the pending update."""
        due, self._update = self._update, None
        if due is not None:
            update(self._memory["inverse"], *due)

    def _learn(self, before: Point, after: Point, change: torch.Tensor) -> None:
        y = add(after.gradient, before.gradient, -1.0, out=self._vector.empty())
        sy, yy, along, sg, ss = dots(
            (change, y), (y, y), (change, self._direction), (change, before.gradient), (change, change)
        )
        if not (sy > LEAST * abs(sg) and 0 < yy < math.inf and along > 0 and ss > 0):
            return
        memory = self._memory
        if "inverse" in memory:
            # the change is `length` times the direction, which is minus the matrix times the gradient
            length = ss / along
            curvature = -length * sg / self._shrunk(length)
        else:
            memory["inverse"], memory["pace"] = torch.eye(len(y), dtype=y.dtype, device=y.device) * (sy / yy), 1.0
            curvature = ss * yy / sy
        with_y = multiply(memory["inverse"], y, out=self._vector.empty())
        weights = _weights(len(y), sy, curvature, dot(y, with_y))
        if weights is not None:
            scale, of_y, of_both, of_s = weights
            left = torch.stack((of_y * with_y + of_both * change, of_both * with_y + of_s * change))
            self._update = _Update(scale, left, torch.stack((with_y, change)))

    def _shrunk(self, length: float) -> float:
        """Shrink the matrix if steps were short, and return the factor or 1; the last step was `length` directions."""
        memory = self._memory
        pace = memory.get("pace", 1.0) ** (1 - LAST) * length**LAST
        memory["pace"] = pace if pace >= SHORT else 1.0
        if pace >= SHORT:
            return 1.0
        memory["inverse"].mul_(pace)
        return float(pace)

    def _settle(self, run: Search) -> None:
        self._catch_up()
        super()._settle(run)

    def state_dict(self) -> dict[str, Any]:
        """See `Minimizer.state_dict`."""
        self._catch_up()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._catch_up()
        return super().__getstate__()

    def _forget(self) -> None:
        self._update = None
        self._memory.pop("inverse", None)

    def _first(self, slope: float) -> float | None:
        return 1.0 if self._knows else None


def _weights(size: int, sy: float, curvature: float, yhy: float) -> tuple[float, float, float, float] | None:
    """Return the factor of the inverse Hessian H, and the weights of Hy (Hy)', of Hy s' + s (Hy)' and of s s', which
    are then added.

    `sy` is s'y, `curvature` s'Bs with the inverse B of H, `yhy` y'Hy. None if rounding leaves no positive definite
    update. The formulas are those of Al-Baali and Khalfan 2005, with their names: b, h, a, c, rho, theta, sigma, tau.
    """
    b, h = curvature / sy, yhy / sy
    a = b * h - 1.0
    if not (a > 0 and math.isfinite(a)):  # s and Hy are parallel: theta makes no difference
        theta, sigma, a = 0.0, 1.0, 0.0
    else:
        c = math.sqrt(a / (1.0 + a))
        rho = min(1.0, h / ((1.0 + a) * (1.0 + c)))  # h (1 - c), which is 0 in floating point for a large a
        theta = max((rho - 1.0) / a, min(1.0 / rho, (1.0 - b) / b))
        sigma = 1.0 + a * theta
    if not (sigma > 0 and b > 0 and math.isfinite(b) and sy * sy > 0 and yhy * yhy > 0):
        return None
    root = sigma ** (-1.0 / max(size - 1, 1))
    shorter = min(1.0, 1.0 / b)
    tau = shorter * min(root, 1.0 / theta) if theta > 0 else min(shorter * root, sigma)
    part = (1.0 - theta) / sigma * yhy / tau
    return 1.0 / tau, -1.0 / (tau * yhy) + part / yhy**2, -part / (sy * yhy), part / sy**2 + 1.0 / sy
