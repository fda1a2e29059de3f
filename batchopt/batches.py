"""Reading what the user calls a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchopt.denominators import running_denominators
from batchopt_workers.batch import Batch, Collate, Columns, Samples
from batchopt_workers.weighting import Weighting


def read_batch(
    inputs: Any, targets: Any, options: Any, *, collate: Collate | None, reduction: str, criterion: Any
) -> Batch:
    """The batch that `inputs`, `targets` (or None) and `options` (or None) make up; its loss is as `reduction` and `criterion` say.

    A tensor, or a tuple or dict of tensors, holds samples along the first dimension. A list is either one entry a sample or, when
    its entries are tensors of one length, such columns: the number of targets and options decides. Raises `TypeError` or `ValueError` for data
    without samples, of different lengths, that the workers cannot take, or that can be read both ways.
    """
    options = _read_options(options)
    readings = _readings("inputs", inputs, collate is not None)
    target_readings = _readings("targets", targets, collate is not None) if targets is not None else {}
    wanted = set(target_readings) if target_readings else None
    if options is not None:
        wanted = {len(options)} & wanted if wanted is not None else {len(options)}
    sizes = set(readings) if wanted is None else set(readings) & wanted
    if not sizes:
        raise ValueError(_mismatch(readings, target_readings, options))
    size = _decide(sizes, readings)
    if size == 0:
        raise ValueError("the batch has 0 samples")
    chosen_targets = target_readings[size] if target_readings else None
    running = running_denominators(criterion, chosen_targets) if reduction == "mean" else None
    return Batch(readings[size], chosen_targets, options, Weighting(reduction, size, running), collate)


def _read_options(options: Any) -> list[Any] | None:
    if options is None:
        return None
    if isinstance(options, (str, bytes)) or not isinstance(options, (Sequence, torch.Tensor)):
        raise TypeError(
            f"`options` must be a sequence with one entry a sample (None allowed); got {type(options).__name__}"
        )
    return list(options)


def _readings(name: str, data: Any, samples_only: bool) -> dict[int, Columns | Samples]:
    """Each number of samples that `data` can be read as, with that reading."""
    found: dict[int, Columns | Samples] = {}
    if isinstance(data, list):
        if not samples_only and data and all(isinstance(item, torch.Tensor) for item in data):
            lengths = {item.shape[0] if item.dim() else -1 for item in data}
            if len(lengths) == 1 and -1 not in lengths:
                found[lengths.pop()] = Columns(data)
        found.setdefault(len(data), Samples(data))
        _check_tensors(name, data)
        return found
    tensors = _check_tensors(name, data)
    if not tensors:
        raise TypeError(
            f"`{name}` must be a tensor, a tuple or dict of tensors, or a list of samples; got {type(data).__name__}"
        )
    first_path, first = tensors[0]
    for path, tensor in tensors:
        if tensor.dim() == 0:
            raise TypeError(f"`{path}` is a 0-dim tensor: there is no dimension of samples to split")
        if tensor.shape[0] != first.shape[0]:
            raise ValueError(f"`{first_path}` has {first.shape[0]} samples but `{path}` has {tensor.shape[0]}")
    return {first.shape[0]: Columns(data)}


def _check_tensors(path: str, data: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in `data` with the path to each; raises `ValueError` for one that cannot be shared with workers."""
    if isinstance(data, torch.Tensor):
        if data.requires_grad and not data.is_leaf:
            raise ValueError(f"`{path}` requires grad and is not a leaf: call .detach() on it")
        if data.layout is not torch.strided:
            raise ValueError(f"`{path}` is sparse ({data.layout}): call .to_dense() on it, or pass a list of samples")
        return [(path, data)]
    items: Any = ()
    if isinstance(data, (tuple, list)):
        items = enumerate(data)
    elif isinstance(data, dict):
        items = data.items()
    return [found for key, item in items for found in _check_tensors(f"{path}[{key!r}]", item)]


def _mismatch(readings: dict[int, Any], target_readings: dict[int, Any], options: list[Any] | None) -> str:
    parts = [f"`inputs` has {_counts(readings)} samples"]
    if target_readings:
        parts.append(f"`targets` has {_counts(target_readings)}")
    if options is not None:
        parts.append(f"`options` has {len(options)}")
    return " but ".join(parts)


def _counts(readings: dict[int, Any]) -> str:
    return " or ".join(str(size) for size in readings)


def _decide(sizes: set[int], readings: dict[int, Columns | Samples]) -> int:
    if len(sizes) == 1:
        return sizes.pop()
    columns = next(size for size in sizes if isinstance(readings[size], Columns))
    samples = next(size for size in sizes if isinstance(readings[size], Samples))
    raise ValueError(
        f"`inputs` is a list of {samples} tensors, each of length {columns}: pass a tuple if they are columns of {columns} samples; "
        f"if they are {samples} samples, pass `options=[None] * {samples}`, or a `collate_fn`"
    )
