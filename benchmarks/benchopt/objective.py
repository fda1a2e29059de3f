"""Logistic regression with a ridge, for benchopt: the mean of log(1 + exp(-y xᵀw)) plus `ridge` / 2 |w|².

pip install benchopt; benchopt run benchmarks/benchopt
"""

from __future__ import annotations

from typing import Any

import numpy as np
from benchopt import BaseObjective


class Objective(BaseObjective):  # type: ignore[misc]
    """The function that solvers minimise, and its gradient's largest element."""

    name = "Logistic regression with a ridge"
    min_benchopt_version = "1.7"
    parameters = {"ridge": [1e-6]}  # noqa: RUF012
    ridge: float

    def set_data(self, X: Any, y: Any) -> None:
        """Take samples, shape `(N, d)`, and their classes, -1 or 1."""
        self.X, self.y = X, y

    def get_objective(self) -> dict[str, Any]:
        """Return what a solver is given."""
        return {"X": self.X, "y": self.y, "ridge": self.ridge}

    def get_one_result(self) -> dict[str, Any]:
        """Return a result of the right form."""
        return {"w": np.zeros(self.X.shape[1])}

    def evaluate_result(self, w: Any) -> dict[str, float]:
        """Return f and its gradient's largest element."""
        margins = self.y * (self.X @ w)
        slopes = -self.y / (1 + np.exp(margins))
        gradient = self.X.T @ slopes / len(self.y) + self.ridge * w
        value = np.logaddexp(0, -margins).mean() + self.ridge / 2 * w @ w
        return {"value": float(value), "gradient": float(np.abs(gradient).max())}
