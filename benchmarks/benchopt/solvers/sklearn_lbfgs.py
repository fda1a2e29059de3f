"""scikit-learn's LogisticRegression, whose L-BFGS is SciPy's over a compiled loss."""

from __future__ import annotations

import warnings
from typing import Any

from benchopt import BaseSolver
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression


class Solver(BaseSolver):  # type: ignore[misc]
    """Fitted again with more and more iterations: it does not report them."""

    name = "scikit-learn"
    sampling_strategy = "iteration"
    parameters = {"solver": ["lbfgs", "newton-cholesky"]}  # noqa: RUF012
    requirements = ["scikit-learn"]  # noqa: RUF012
    solver: str

    def set_objective(self, X: Any, y: Any, ridge: float) -> None:
        """Take the data."""
        self.X, self.y, self.C = X, y, 1 / (ridge * len(y))

    def run(self, n_iter: int) -> None:
        """Fit with so many iterations."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            fit = LogisticRegression(C=self.C, fit_intercept=False, tol=1e-14, max_iter=n_iter + 1, solver=self.solver)
            self.w = fit.fit(self.X, self.y).coef_.ravel()

    def get_result(self) -> dict[str, Any]:
        """Return the weights."""
        return {"w": self.w}
