"""SciPy's L-BFGS-B over NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from benchopt import BaseSolver
from scipy.optimize import minimize
from scipy.special import expit


class Solver(BaseSolver):  # type: ignore[misc]
    """Stops by an exception when benchopt has seen enough."""

    name = "SciPy L-BFGS-B"
    sampling_strategy = "callback"

    def set_objective(self, X: Any, y: Any, ridge: float) -> None:
        """Take the data."""
        self.X, self.y, self.ridge = X, y, ridge

    def run(self, callback: Callable[[], bool]) -> None:
        """Make an iteration as long as benchopt wants more."""
        X, y, ridge = self.X, self.y, self.ridge
        self.w = np.zeros(X.shape[1])

        def f(w: Any) -> tuple[float, Any]:
            margins = y * (X @ w)
            gradient = X.T @ (-y * expit(-margins)) / len(y) + ridge * w
            return float(np.logaddexp(0, -margins).mean() + ridge / 2 * w @ w), gradient

        def iterated(w: Any) -> None:
            self.w = w.copy()
            if not callback():
                raise StopIteration

        if callback():
            found = minimize(
                f,
                self.w,
                jac=True,
                method="L-BFGS-B",
                callback=iterated,
                options={"maxiter": 10**6, "maxfun": 10**7, "ftol": 0, "gtol": 1e-12},
            )
            self.w = found.x

    def get_result(self) -> dict[str, Any]:
        """Return the weights."""
        return {"w": self.w}
