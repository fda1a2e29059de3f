"""Map-style datasets: their samples are read by index, by the worker that evaluates them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Dataset, IterableDataset, TensorDataset

from batchopt_workers.data.items import Collate


def samples_of(dataset: Dataset[Any]) -> int:
    """Return the number of samples. Raise `TypeError` for a dataset without a length, or without indexed samples."""
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
        try:
            return len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise TypeError(_not_map_style(dataset)) from error
    raise TypeError(_not_map_style(dataset))


def _not_map_style(dataset: Dataset[Any]) -> str:
    iterable = isinstance(dataset, IterableDataset)
    lacks = "is an IterableDataset, whose samples have no index" if iterable else "has no `__len__`"
    return (
        f"a dataset must be map-style, with `__getitem__` and `__len__`; {type(dataset).__name__} {lacks}: use a "
        "DataLoader of it, with opt.steps(loader)"
    )


def tensors_of(dataset: Dataset[Any], targets: Any, collate: Collate | None) -> tuple[Any, Any]:
    """Return inputs and targets of a dataset that has them as tensors; otherwise the dataset and None. Raise
    `ValueError` for separate `targets`."""
    if targets is not None:
        raise ValueError("`targets` of a Dataset come with its items, (input, target): leave `targets` out")
    if type(dataset) is TensorDataset and collate is None and len(dataset.tensors) <= 2:
        inputs, found = (*dataset.tensors, None)[:2]
        return inputs, found
    return dataset, None
