"""Data that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from benchopt import BaseDataset
from sklearn.datasets import load_breast_cancer, load_digits


class Dataset(BaseDataset):  # type: ignore[misc]
    """Tumours, standardised; and handwritten digits, of which the odd ones are one class."""

    name = "packaged"
    parameters = {"which": ["breast cancer", "odd digits"]}  # noqa: RUF012
    requirements = ["scikit-learn"]  # noqa: RUF012
    which: str

    def get_data(self) -> dict[str, Any]:
        """Return samples and classes."""
        X, y = (load_breast_cancer if self.which == "breast cancer" else load_digits)(return_X_y=True)
        X = (X - X.mean(0)) / np.maximum(X.std(0), 1e-12)
        X = np.hstack([X, np.ones((len(X), 1))])
        return {"X": X, "y": np.where(y % 2 == 1, 1.0, -1.0)}
