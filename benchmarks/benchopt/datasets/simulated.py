"""Samples of a normal distribution, and classes that a plane divides up to noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from benchopt import BaseDataset


class Dataset(BaseDataset):  # type: ignore[misc]
    """By default the sizes of a table of 200,000 rows, and of a wide one."""

    name = "simulated"
    parameters = {"size": [(200_000, 50), (5_000, 1_000)]}  # noqa: RUF012
    size: tuple[int, int]

    def get_data(self) -> dict[str, Any]:
        """Return samples and classes."""
        generator = np.random.default_rng(0)
        samples, features = self.size
        X = generator.standard_normal((samples, features)) * np.logspace(-1, 1, features)
        w = generator.standard_normal(features) / np.logspace(-1, 1, features)
        y = np.where(X @ w + 2 * generator.standard_normal(samples) > 0, 1.0, -1.0)
        return {"X": X, "y": y}
