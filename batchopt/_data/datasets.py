"""Map-style datasets: their samples are read by index."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Dataset


def samples_of(dataset: Dataset[Any]) -> int:
    """The number of samples. Raises `TypeError` for a dataset without a length."""
    if isinstance(dataset, Sized):
        try:
            return len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise TypeError(_without_length(dataset)) from error
    raise TypeError(_without_length(dataset))


def _without_length(dataset: Dataset[Any]) -> str:
    return (
        f"a dataset must be map-style, with `__getitem__` and `__len__`; {type(dataset).__name__} has no length: give "
        "it one, or iterate over it with a DataLoader in opt.steps(loader)"
    )
