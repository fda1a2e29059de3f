"""Conversion of the user's data into a `Batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from batchopt._data.denominators import (
    checked_denominators,
    divides_once,
    given_denominators,
    ignored_class,
    own_denominators,
    rows_of_as_many,
    rows_of_samples,
    running_denominators,
    unread_denominators,
)
from batchopt._data.terms import Weighted, check_names, read_weights, refuse_weights
from batchopt.errors import TRAINER_ADVICE
from batchopt_workers.batch.batch import Batch, Columns, Part, Samples
from batchopt_workers.batch.items import Collate, Items
from batchopt_workers.batch.weighting import SAMPLE_WEIGHT, Denominators, Weighting
from batchopt_workers.evaluate.objective import LossFunction
from batchopt_workers.functions.squares import MeanSquare
from batchopt_workers.functions.task import ChunkFunction
from batchopt_workers.wire.structures import can_be_cut, is_record, is_tensordict, items_of, map_tensors, tensors_in


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


InMemory = Columns | Samples


@dataclass(frozen=True)
class BatchSpec:
    """The rules for turning the user's data into a batch: how lists of samples are collated, and the loss of a batch.

    `device`: all tensors must be there, since the workers compute there; None: anywhere. `cache`: workers keep what
    they have read of a dataset. `loss_fn`: samples may have weights if it is one of residuals. `own`: the inputs of a
    term of one sample that the user's data does not have; None: it has them.
    """

    collate: Collate | None
    reduction: str
    criterion: Any
    denominators: Denominators | None
    device: torch.device | None = None
    cache: bool = True
    loss_fn: LossFunction | None = None
    own: torch.Tensor | None = None

    def weighed(self, part: Part) -> Part:
        """Return the part with the weighting of its samples."""
        inputs, targets, size = part.inputs, part.targets, len(part.inputs)
        sample_weight = part.criterion_rows.get(SAMPLE_WEIGHT)
        own = {} if sample_weight is None else {SAMPLE_WEIGHT: sample_weight}
        if sample_weight is not None:
            is_read = isinstance(inputs, Items)
            refuse_weights(self.criterion, isinstance(self.loss_fn, MeanSquare), self.denominators, is_read)
        if isinstance(inputs, Items):
            counts_alike = self.reduction == "mean" and self.denominators is None
            items = replace(inputs, ignored=ignored_class(self.criterion) if counts_alike else None)
            rows = {**rows_of_as_many(self.criterion, size), **own}
            running = running_denominators(sample_weight) if self.reduction == "mean" else None
            return replace(part, inputs=items, weighting=Weighting(self.reduction, size, running), criterion_rows=rows)
        weighting = self.weighting(inputs.data, None if targets is None else targets.data, size, targets, sample_weight)
        return replace(part, weighting=weighting, criterion_rows={**rows_of_samples(self.criterion, targets), **own})

    def weighting(
        self,
        inputs: Any,
        targets: Any,
        samples: int,
        columns: InMemory | None,
        sample_weight: torch.Tensor | None = None,
    ) -> Weighting:
        """Return the weighting of the samples."""
        each, divided_once = None, False
        if self.reduction == "mean" and self.denominators is not None:
            each = given_denominators(self.denominators, inputs, targets, samples)
        elif self.reduction == "mean":
            each = own_denominators(self.criterion, columns)
            divided_once = each is not None and (sample_weight is not None or divides_once(self.criterion))
            if sample_weight is not None:
                each = sample_weight if each is None else each * sample_weight
        return Weighting(self.reduction, samples, running_denominators(each), divided_once)

    def unread_denominators(self, part: Part) -> ChunkFunction | None:
        """Return a function for the denominators of samples that only workers read; None if they are known."""
        is_known = not isinstance(part.inputs, Items) or self.reduction == "sum" or part.weighting.running is not None
        return None if is_known else unread_denominators(self.criterion, self.denominators)

    def weighting_of(self, each: torch.Tensor, samples: int) -> Weighting:
        """Return the weighting of samples that were found to have these denominators; all NaN: they count equally."""
        if bool(each.isnan().all()) and self.denominators is None:
            return Weighting(self.reduction, samples)
        running = running_denominators(checked_denominators(each, samples))
        return Weighting(self.reduction, samples, running, self.denominators is None and divides_once(self.criterion))


# The reading of each term, by name; under None if there are no terms.
BatchSpecs = Mapping[str | None, BatchSpec]


def with_samples(specs: BatchSpecs) -> BatchSpecs:
    """Return the specs of the terms whose samples are the user's."""
    return {name: spec for name, spec in specs.items() if spec.own is None}


def reweighed(batch: Batch, specs: BatchSpecs) -> Batch:
    """Return a batch that was read before, with the weightings by these specs."""
    return Batch(tuple(specs[part.name].weighed(part) for part in batch.parts))


def read_batch(inputs: Any, targets: Any, options: Any, specs: BatchSpecs) -> Batch:
    """Return the batch of `inputs`, `targets` (or None) and `options` (or None), each read as by `read_part`.

    With terms, `inputs` is a dict with an entry for each: its inputs, or a tuple of inputs, targets and options. Raise
    `TypeError` or `ValueError`, which names the term.
    """
    if None in specs:
        return Batch((read_part(inputs, targets, options, specs[None]),))
    terms = {name: spec for name, spec in specs.items() if name is not None}
    if targets is not None or options is not None:
        what = "targets" if targets is not None else "options"
        raise ValueError(
            f"`{what}` of terms go into the batch: {{name: (inputs, targets, options)}}; leave `{what}` out"
        )
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"the batch must be a dict with an entry for each of {list(terms)}; got {type(inputs).__name__}"
        )
    own = {name: spec.own for name, spec in terms.items() if spec.own is not None}
    if given := [name for name in own if name in inputs]:
        raise ValueError(f"the batch has {given}, which is a Penalty, a function of the module alone: leave it out")
    check_names("the batch", inputs, {name: spec for name, spec in terms.items() if name not in own})
    return Batch(tuple(_read_term(name, own.get(name, inputs.get(name)), spec) for name, spec in terms.items()))


def _read_term(name: str, entry: Any, spec: BatchSpec) -> Part:
    given = entry if type(entry) is tuple else (entry,)
    try:
        if not 1 <= len(given) <= 3:
            raise ValueError(
                f"a tuple must be (inputs,), (inputs, targets) or (inputs, targets, options); got {len(given)} items"
            )
        inputs, targets, options = (*given, None, None)[:3]
        return replace(read_part(inputs, targets, options, spec), name=name)
    except (TypeError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"term {name!r}: {error}") from error


def read_part(inputs: Any, targets: Any, options: Any, spec: BatchSpec) -> Part:
    """Return the data of `inputs`, `targets` (or None) and `options` (or None).

    A tensor or a NumPy array, or a tuple, mapping or dataclass of them, holds samples along the first dimension. A list
    has one entry a sample. A map-style Dataset includes its targets. `Weighted` inputs have weights of samples. Raise
    `TypeError` or `ValueError` for data without samples, of different lengths, or that workers cannot receive.
    """
    if isinstance(inputs, Weighted):
        if isinstance(inputs.inputs, Weighted):
            raise TypeError("`inputs` are Weighted twice: multiply the weights, and give them once")
        part = read_part(inputs.inputs, targets, options, spec)
        rows = {SAMPLE_WEIGHT: read_weights(inputs.sample_weight, part.size)}
        return spec.weighed(replace(part, criterion_rows=rows))
    options = _read_options(options)
    if isinstance(inputs, Dataset):
        inputs, targets = tensors_of(inputs, targets, spec.collate)
        if isinstance(inputs, Dataset):
            return _read_items(inputs, options, spec)
    try:
        inputs, targets = as_tensors(inputs), as_tensors(targets)
        samples = _reading("inputs", inputs, spec)
        answers = None if targets is None else _reading("targets", targets, spec)
    except RecursionError:
        raise ValueError(
            "the batch is nested too deeply to be read, or contains itself: pass a tensor, or a flat tuple, dict or "
            "list of them"
        ) from None
    size = len(samples)
    others = {name: len(of) for name, of in (("targets", answers), ("options", options)) if of is not None}
    if differing := [f"`{name}` has {count}" for name, count in others.items() if count != size]:
        hint = ": a list has one entry a sample; pass a tuple of columns" * isinstance(inputs, list)
        raise ValueError(f"`inputs` has {size} samples but {' and '.join(differing)}{hint}")
    if size == 0:
        raise ValueError("the batch has 0 samples")
    return spec.weighed(Part(samples, answers, options, Weighting("sum", size), spec.collate))


def _read_items(dataset: Dataset[Any], options: list[Any] | None, spec: BatchSpec) -> Part:
    size = samples_of(dataset)
    if size == 0:
        raise ValueError("the batch has 0 samples")
    if options is not None and len(options) != size:
        raise ValueError(f"`inputs` has {size} samples but `options` has {len(options)}")
    items, weighting = Items(dataset, size, spec.cache), Weighting("sum", size)
    return spec.weighed(Part(items, None, options, weighting, spec.collate or default_collate))


def _read_options(options: Any) -> list[Any] | None:
    if options is None:
        return None
    is_sequence = options.dim() > 0 if isinstance(options, torch.Tensor) else isinstance(options, Sequence)
    if isinstance(options, (str, bytes)) or not is_sequence:
        raise TypeError(
            f"`options` must be a sequence with one entry a sample (None allowed); got {type(options).__name__}"
        )
    return list(options)


def _reading(name: str, data: Any, spec: BatchSpec) -> InMemory:
    """Return a list as samples, and anything else as columns."""
    tensors = _check_tensors(name, data, spec.device)
    if isinstance(data, list):
        return Samples(data)
    for item in (data, *(item for _, item in items_of(data))):
        if hasattr(item, "to_numpy"):  # of pandas, say: beside tensors it would belong to all samples
            raise TypeError(f"`{name}` is or has a {type(item).__name__}: call .to_numpy() on it")
    if not tensors:
        raise TypeError(
            f"`{name}` must be a tensor (torch.as_tensor makes one), a tuple or dict of tensors, or a list of samples; "
            f"got {type(data).__name__}{_advice(data)}"
        )
    first_path, first = tensors[0]
    for path, tensor in tensors:
        if tensor.dim() == 0:
            raise TypeError(
                f"`{path}` is a 0-dim tensor: there is no dimension of samples to split; a number for all samples is "
                "no tensor, but .item() of it, or a buffer of the module"
            )
        if tensor.shape[0] != first.shape[0]:
            raise ValueError(
                f"`{first_path}` has {first.shape[0]} samples but `{path}` has {tensor.shape[0]}: what belongs to all "
                "samples is a buffer of the module"
            )
    return Columns(data)


def as_tensors(data: Any) -> Any:
    """Return the data with tensors over the memory of its numeric NumPy arrays. If there are tensors too, the arrays
    stay as they are; so do the samples of a list."""
    if isinstance(data, list) or next(tensors_in(data), None) is not None:
        return data
    return map_tensors(_as_tensor, data, lambda item: isinstance(item, np.ndarray) and item.dtype.kind in "biufc")


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides) and array.dtype.isnative
    return torch.from_numpy(array if usable else array.astype(array.dtype.newbyteorder("="), order="C"))


def _advice(data: Any) -> str:
    """Return advice for an object that holds samples but is not a batch."""
    if isinstance(data, torch.utils.data.DataLoader):
        return (
            ": `for loss in opt.steps(loader)` steps on each of its batches, opt.full_gradient(loader) sums over all "
            "of them; all its data as one batch are loader.dataset, which the workers read (with the loader's "
            "collate_fn, if it has one, as that of BatchOptimizer)"
        )
    if isinstance(data, Dataset):
        return ": a dataset takes the place of inputs and targets, with items (input, target)"
    if hasattr(data, "state_dict") and hasattr(data, "turns"):  # Batches
        return ": `for loss in opt.steps(batches)` steps on each of them"
    if hasattr(data, "to_data_list"):  # torch_geometric's Batch
        return (
            ": pass the list of graphs, data.to_data_list(), with collate_fn=Batch.from_data_list, so that it can be "
            "cut (and with targets: collate_fn=lambda pairs: (Batch.from_data_list([g for g, _ in pairs]), ...))"
        )
    return f": {TRAINER_ADVICE}" if callable(data) else ""


def _check_tensors(path: str, data: Any, device: torch.device | None) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in `data` with the path to each; raise `ValueError` for one that cannot be shared with
    workers, or that is not on `device`."""
    if isinstance(data, torch.Tensor):
        if data.requires_grad and not data.is_leaf:
            raise ValueError(f"`{path}` requires grad and is not a leaf: call .detach() on it")
        if data.is_nested:
            raise ValueError(
                f"`{path}` is a nested tensor: pass the list of its samples, list({path}.unbind()), or pad it"
            )
        if data.layout is not torch.strided:
            raise ValueError(f"`{path}` is sparse ({data.layout}): call .to_dense() on it")
        if device is not None and data.device != device:
            raise ValueError(
                f"`{path}` is on {data.device}; workers run on {device}: call .to('{device}') on it, or use "
                "parallelize=1"
            )
        return [(path, data)]
    if is_tensordict(data) and not can_be_cut(data):
        raise ValueError(
            f"`{path}` is a {type(data).__name__} (a tensorclass, a stack, or memory of a file), which cannot be cut: "
            "call .to_tensordict() on it; where texts are stacked, .to_dict() on the whole"
        )
    form = "{}.{}" if is_record(data) else "{}[{!r}]"
    return [found for key, item in items_of(data) for found in _check_tensors(form.format(path, key), item, device)]
