"""A user's closure that returns residuals, with the interface that Levenberg-Marquardt needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from batchopt_workers.data.layout import reals
from batchopt_workers.map.squares import checked
from batchopt_workers.process.torch_settings import differentiable_twice
from batchopt_workers.tasks.jacobian import ROOM, dense, product_with
from batchopt_workers.tasks.least_squares import PROBE, moved

# `closure()` returns a tensor of residuals, of any shape but a scalar's.
ResidualsClosure = Callable[[], torch.Tensor]


class ResidualSquares:
    """f, the sum of the squares of the closure's residuals, and its normal equations, over `parameters`."""

    def __init__(self, closure: ResidualsClosure, parameters: Sequence[torch.Tensor]) -> None:
        self._closure, self.parameters = closure, parameters
        self._sizes = [reals(parameter.detach()).numel() for parameter in parameters]
        self._size = sum(self._sizes)

    def __call__(self) -> torch.Tensor:
        """Return f, and set df/dX in each `.grad`."""
        residuals = self._residuals()
        for parameter, gradient in zip(self.parameters, self._backward(residuals, 2 * residuals.detach()), strict=True):
            parameter.grad = gradient
        return residuals.detach().double().square().sum()

    def normal(self, limit: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """See `Squares`."""
        with torch.enable_grad():
            residuals = self._residuals().reshape(-1)
        vector = torch.zeros(self._size, dtype=torch.float64, device=residuals.device)
        matrix = vector.new_zeros(self._size, self._size)
        values, count = residuals.detach().double(), max(ROOM // (8 * self._size), 1)
        for start in range(0, len(residuals), count):
            rows = self._rows(residuals, range(start, min(start + count, len(residuals)))).double()
            vector.addmv_(rows.T, values[start : start + count])
            matrix.addmm_(rows.T, rows)
        return float(values.square().sum()), vector, matrix

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        residuals = self._residuals()
        return self._joined(self._backward(residuals, self._along(residuals, v)))

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        """See `Squares`: by finite differences, like `BatchOptimizer.closure`."""
        residuals = self._residuals()
        along = self._along(residuals, v)
        with moved(self.parameters, v * PROBE):
            ahead = self._residuals().detach()
        second = ((ahead - residuals.detach()) / PROBE - along) * (2 / PROBE)
        return self._joined(self._backward(residuals, second))

    def _residuals(self) -> torch.Tensor:
        with torch.enable_grad(), differentiable_twice():
            found = checked(self._closure())
        if found.dim() == 0:
            raise TypeError(
                "the closure of LevenbergMarquardt returned a scalar: return the residuals themselves, whose squares "
                "it sums, or use BatchOptimizer.step, or pass BatchOptimizer.closure"
            )
        if not found.requires_grad:
            raise ValueError("the residuals depend on no parameter: look for .detach() or torch.no_grad() on their way")
        return found

    def _backward(self, residuals: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad(residuals, [*self.parameters], weights, retain_graph=True, allow_unused=True)
        pairs = zip(found, self.parameters, strict=True)
        return [torch.zeros_like(parameter) if g is None else dense(g) for g, parameter in pairs]

    def _rows(self, residuals: torch.Tensor, which: range) -> torch.Tensor:
        """Return the rows of these residuals by a batched backward, or one by one where that is unsupported."""
        units = torch.zeros(len(which), len(residuals), dtype=residuals.dtype, device=residuals.device)
        units[torch.arange(len(which)), torch.tensor(which)] = 1.0
        try:
            found = torch.autograd.grad(
                residuals, [*self.parameters], units, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except RuntimeError:  # a function without a batching rule
            return torch.stack([self._joined(self._backward(residuals, unit)) for unit in units])
        pairs = zip(found, self._sizes, strict=True)
        flat = [units.new_zeros(len(which), n) if g is None else reals(g).reshape(len(which), -1) for g, n in pairs]
        return torch.cat(flat, dim=1)

    def _along(self, residuals: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return J times a vector, in the shape of the residuals."""
        return product_with(residuals, self.parameters, torch.split(v, self._sizes))

    def _joined(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([reals(gradient).reshape(-1) for gradient in gradients])
