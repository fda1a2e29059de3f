"""batchopt: its optimizers over workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchopt import BaseSolver

import batchopt


class Solver(BaseSolver):  # type: ignore[misc]
    """Runs until it is told to stop, or has converged. Workers start before the clock."""

    name = "batchopt"
    sampling_strategy = "callback"
    parameters = {"optimizer": ["LBFGS", "SSBroyden"], "workers": [1, 2]}  # noqa: RUF012
    optimizer: str
    workers: int

    def set_objective(self, X: Any, y: Any, ridge: float) -> None:
        """Load the data, and start the workers."""
        self.module = torch.nn.Linear(X.shape[1], 1, bias=False, dtype=torch.float64)

        def loss(module: Any, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            found = torch.nn.functional.softplus(-classes * module(inputs)).mean()
            whole: torch.Tensor = found + ridge / 2 * module.weight.square().sum()
            return whole

        self.opt = batchopt.BatchOptimizer(self.module, loss_fn=loss, optimizer=None, parallelize=self.workers)
        self.opt.load(torch.as_tensor(X), torch.as_tensor(y)[:, None])
        self.opt.evaluate()
        batchopt.LBFGS(self.module.parameters())  # the first optimizer of a process imports parts of torch

    def run(self, callback: Callable[[], bool]) -> None:
        """Make an iteration as long as benchopt wants more."""
        torch.nn.init.zeros_(self.module.weight)
        if callback():
            optimizer = getattr(batchopt, self.optimizer)(
                self.module.parameters(),
                max_iter=None,
                tolerance_grad=1e-12,
                tolerance_change=0,
                callback=lambda iteration: not callback(),
            )
            optimizer.step(self.opt.evaluate)

    def get_result(self) -> dict[str, Any]:
        """Return the weights."""
        return {"w": self.module.weight.detach().numpy().ravel().copy()}
