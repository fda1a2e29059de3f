"""torch.optim.LBFGS in this process."""

from __future__ import annotations

from typing import Any

import torch
from benchopt import BaseSolver


class Solver(BaseSolver):  # type: ignore[misc]
    """Run again with more and more iterations: a step of one iteration each would forget its line search."""

    name = "torch.optim.LBFGS"
    sampling_strategy = "iteration"

    def set_objective(self, X: Any, y: Any, ridge: float) -> None:
        """Take the data."""
        self.X, self.y, self.ridge = torch.as_tensor(X), torch.as_tensor(y), ridge

    def run(self, n_iter: int) -> None:
        """Make so many iterations."""
        self.w = torch.zeros(self.X.shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [self.w],
            max_iter=n_iter,
            max_eval=10**6,
            tolerance_grad=0,
            tolerance_change=0,
            history_size=10,
            line_search_fn="strong_wolfe",
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.softplus(-self.y * (self.X @ self.w)).mean()
            loss = loss + self.ridge / 2 * self.w.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if n_iter:
            optimizer.step(closure)  # type: ignore[no-untyped-call]

    def get_result(self) -> dict[str, Any]:
        """Return the weights."""
        return {"w": self.w.detach().numpy().copy()}
