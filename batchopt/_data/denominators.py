"""Denominators: a mean is the sum over all samples divided by the sum of their denominators (weights, tokens, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchopt_workers.batch.batch import Columns, Samples
from batchopt_workers.batch.weighting import ClassDenominators, Denominators, GivenDenominators, class_denominators
from batchopt_workers.functions.task import ChunkFunction

# Losses whose mean divides by class weights; the last is not in every torch.
_OF_CLASSES: Any = (
    torch.nn.CrossEntropyLoss,
    torch.nn.NLLLoss,
    *([torch.nn.LinearCrossEntropyLoss] if hasattr(torch.nn, "LinearCrossEntropyLoss") else []),
)
# Losses whose weights may have a row for each sample.
_OF_ENTRIES = (torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss)
_REDUCTIONS = ("mean", "sum")
_ASKED_FOR = ("reduction", "weight", "pos_weight", "ignore_index", "label_smoothing")


def resolve_reduction(reduction: str | None, criterion: Any) -> str:
    """Return `"mean"` or `"sum"`: the given one, else the criterion's own, else the mean.

    Raise `ValueError` for a criterion that does not reduce, and for any other word.
    """
    own = getattr(criterion, "reduction", None)
    own = "mean" if own == "batchmean" else own
    if own == "none":
        raise ValueError("`criterion` has reduction='none': use reduction='mean' or 'sum', the loss must be a scalar")
    if reduction is None:
        return "sum" if own == "sum" else "mean"
    if reduction not in _REDUCTIONS:
        raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}")
    if own in _REDUCTIONS and own != reduction:
        raise ValueError(f"`reduction` is {reduction!r} but the criterion's own is {own!r}: leave `reduction` out")
    return reduction


def marks_of(criterion: Any) -> tuple[Any, ...]:
    """Return a value that changes whenever a property of the criterion that is used here is changed."""
    is_module = isinstance(criterion, torch.nn.Module)  # its own `getattr` of a missing name is slow
    own, buffers = (vars(criterion), criterion._buffers) if is_module else ({}, {})
    found: list[Any] = []
    for name in _ASKED_FOR:
        one = own.get(name, buffers.get(name)) if is_module else getattr(criterion, name, None)
        if isinstance(one, torch.Tensor):
            found += (id(one), None if one.is_inference() else one._version)
        else:
            found.append(one)
    return tuple(found)


def running_denominators(each: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of the denominators of the samples before each (shape `(samples + 1,)`, float64)."""
    return None if each is None else torch.cat([each.new_zeros(1), each.cumsum(0)])


def given_denominators(function: Denominators, inputs: Any, targets: Any, samples: int) -> torch.Tensor:
    """Return the checked result of the user's `denominators(inputs, targets)`: `samples` finite numbers >= 0."""
    return checked_denominators(function(inputs, targets), samples)


def checked_denominators(found: Any, samples: int) -> torch.Tensor:
    """Return the user's `denominators` as float64 (shape `(samples,)`). Raise `TypeError` or `ValueError`."""
    try:
        each = torch.as_tensor(found).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"`denominators` must return one number a sample; got {type(found).__name__}: {error}"
        ) from error
    if each.is_complex():
        raise TypeError("`denominators` must return real numbers; got complex ones")
    each = each.double().cpu()
    if each.shape != (samples,):
        raise ValueError(
            f"`denominators` must return one number a sample, shape ({samples},); got shape {tuple(each.shape)}"
        )
    if not bool((each.isfinite() & (each >= 0)).all()):
        raise ValueError("`denominators` must return finite numbers >= 0")
    return each


def is_torchs_own(criterion: Any) -> bool:
    """Tell whether `criterion` is a loss of `torch.nn` with torch's own forward: a subclass or an instance with another
    forward computes something else."""
    kind = type(criterion)
    if not isinstance(criterion, torch.nn.Module) or "forward" in vars(criterion):
        return False
    defines = next(base for base in kind.__mro__ if "forward" in vars(base))
    return kind.__call__ is torch.nn.Module.__call__ and defines.__module__ == torch.nn.modules.loss.__name__


def divides_once(criterion: Any) -> bool:
    """Tell whether samples that add nothing to the divisor of one of torch's means may still have a loss: label
    smoothing counts all classes, also for targets of weight 0."""
    weight: torch.Tensor | None = getattr(criterion, "weight", None)
    return getattr(criterion, "label_smoothing", 0.0) > 0 and weight is not None and bool((weight == 0).any())


def own_denominators(criterion: Any, targets: Columns | Samples | None) -> torch.Tensor | None:
    """Return each sample's denominator (shape `(samples,)`, float64) in the mean of one of torch's losses; None if all
    count equally.

    Cross entropy and negative log likelihood divide by the class weights of the targets that are not ignored. In a list
    of samples that holds for one class per sample; if each has several, f is the mean of the samples' losses.
    """
    if not isinstance(criterion, _OF_CLASSES) or not is_torchs_own(criterion) or targets is None:
        return None
    weight: torch.Tensor | None = criterion.weight
    classes = targets.data if isinstance(targets, Columns) else _stacked(targets.data)
    if not isinstance(classes, torch.Tensor) or classes.is_floating_point():
        return None
    if weight is None and not bool((classes == _ignored(criterion)).any()):
        return None
    return class_denominators(classes, weight, _ignored(criterion))


def _ignored(criterion: Any) -> int:
    return -100 if criterion.ignore_index is None else int(criterion.ignore_index)


def ignored_class(criterion: Any) -> int | None:
    """Return the class whose samples do not count in one of torch's losses: without such samples, and without class
    weights, all samples count equally. None if there is no such class."""
    own = isinstance(criterion, _OF_CLASSES) and is_torchs_own(criterion)
    return _ignored(criterion) if own and criterion.weight is None else None


def unread_denominators(criterion: Any, denominators: Denominators | None) -> ChunkFunction | None:
    """Return the function that determines each sample's denominator when its targets are read; None if all count
    equally, unless they are ignored."""
    if denominators is not None:
        return GivenDenominators(denominators)
    if isinstance(criterion, _OF_CLASSES) and is_torchs_own(criterion) and criterion.weight is not None:
        return ClassDenominators(criterion.weight.detach(), _ignored(criterion))
    return None


def rows_of_samples(criterion: Any, targets: Columns | Samples | None) -> dict[str, torch.Tensor]:
    """Return those of the criterion's `weight` and `pos_weight` that have one row for each sample of the batch, not
    those of features."""
    if not isinstance(criterion, _OF_ENTRIES) or not is_torchs_own(criterion) or not targets:
        return {}
    one = targets.sample(0)
    if not isinstance(one, torch.Tensor) or len(targets) < 2:
        return {}
    found = {name: getattr(criterion, name, None) for name in ("weight", "pos_weight")}
    return {
        name: rows.detach()
        for name, rows in found.items()
        if rows is not None and rows.dim() > one.dim() and rows.shape[0] == len(targets)
    }


def rows_of_as_many(criterion: Any, samples: int) -> dict[str, torch.Tensor]:
    """Return those of the criterion's `weight` and `pos_weight` with as many rows as there are samples. The targets
    tell later whether these are the samples'."""
    if not isinstance(criterion, _OF_ENTRIES) or not is_torchs_own(criterion) or samples < 2:
        return {}
    found = {name: getattr(criterion, name, None) for name in ("weight", "pos_weight")}
    return {
        name: rows.detach()
        for name, rows in found.items()
        if rows is not None and rows.dim() > 0 and rows.shape[0] == samples
    }


def _stacked(samples: Sequence[Any]) -> torch.Tensor | None:
    """Return a list of single classes, tensors or ints, as one tensor; None for other lists."""
    if all(sample.numel() == 1 if isinstance(sample, torch.Tensor) else isinstance(sample, int) for sample in samples):
        return torch.stack([torch.as_tensor(sample).reshape(()) for sample in samples])
    return None
