"""The module's outputs for data of any size, and metrics of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from batchopt._data import arguments
from batchopt._data.batches import Reading, read_part
from batchopt._data.prefetch import Ahead, as_arguments
from batchopt._function.function import BatchFunction, ReadsAhead
from batchopt._function.metrics import Measure, read_metrics, values
from batchopt._function.prepared import whole
from batchopt._function.tasks import collect, select
from batchopt._mapreduce.results import common_form
from batchopt_workers.batch import Batch
from batchopt_workers.forms import rows_form
from batchopt_workers.structures import is_record
from batchopt_workers.task import Predicted, Task

Transform = Callable[[Any], Any]


class _Asked(NamedTuple):
    """A batch that the module is asked about: as it was given, and as workers are given it."""

    given: Any
    batch: Batch


def predict(function: BatchFunction, data: Any, transform: Transform | None) -> Any:
    """The outputs for all of `data`, in its order: for one batch of inputs, or for those of a loader; None: for the
    loaded batch, by term where there are terms."""
    _check_transform(transform)
    function.check_open()
    if data is None:
        selections = select(function, None, None, function.readings)
        found = {s.name: collect(function, s.task(Predicted(transform), False), s.batch) for s in selections}
        return found[None] if None in found else found
    if _is_batch(data):
        return _outputs(function, _read(function, data, None), Predicted(transform))
    batches = [(outputs, asked.batch.size) for outputs, asked in _ask(function, data, transform)]
    _check_any(batches)
    return _joined(batches, "outputs")


def iter_predict(
    function: BatchFunction, batches: Iterable[Any], transform: Transform | None
) -> Iterator[tuple[Any, Any]]:
    """The outputs for each of `batches`, with the batch; the next one is read while the workers compute."""
    _check_transform(transform)
    function.check_open()
    if _is_batch(batches):
        raise TypeError(
            f"`batches` must be a loader, or anything else that yields batches; got {type(batches).__name__}: "
            "predict(inputs) takes one batch"
        )
    return ((found, asked.given) for found, asked in _ask(function, batches, transform))


def _ask(
    function: BatchFunction, batches: Iterable[Any], transform: Transform | None, targets: bool = False
) -> Iterator[tuple[Any, _Asked]]:
    """The outputs for each batch; with `targets` those that workers read of a dataset, too."""

    def read(given: Any) -> _Asked:
        return _Asked(given, _read(function, *as_arguments(given)[:2]))

    ahead = Ahead(whole(batches), read)
    for asked in ahead:
        with function.observers.including(ReadsAhead(ahead)):
            predicted = Predicted(transform, targets=targets and isinstance(asked.given, Dataset))
            found = _outputs(function, asked.batch, predicted)
        yield found, asked


class Scored(NamedTuple):
    """The outputs and targets of a batch of so many samples."""

    outputs: Any
    targets: Any
    samples: int


def score(function: BatchFunction, data: Any, metrics: Any, transform: Transform | None) -> Any:
    """Each metric of all outputs and targets, by name; of a metric without a name, its value."""
    measures = read_metrics(metrics)
    return measured(measures, list(scored(function, data, transform)))


def measured(measures: Mapping[str, Measure], found: Sequence[Scored]) -> Any:
    """Each metric of the outputs and targets of all batches at once."""
    _check_any(found)
    outputs, targets = (
        found[0][:2]
        if len(found) == 1
        else (
            _joined([(batch.outputs, batch.samples) for batch in found], "outputs"),
            _joined([(batch.targets, batch.samples) for batch in found], "targets"),
        )
    )
    return values(measures, outputs, targets)


def scored(function: BatchFunction, data: Any, transform: Transform | None) -> Iterator[Scored]:
    """The outputs and targets of `data`: of one batch, or of each one of a loader, the next being read meanwhile."""
    _check_transform(transform)
    function.check_open()
    if isinstance(data, Dataset) and not isinstance(data, Iterator):
        return iter([_scored_of_dataset(function, _read(function, data, None), transform)])
    if _is_batch(data):
        inputs, targets, _ = as_arguments(data)
        if targets is None:
            raise ValueError("`data` must be (inputs, targets), a loader of such, or a dataset: there are no targets")
        batch = _read(function, inputs, targets)
        return iter([Scored(_outputs(function, batch, Predicted(transform)), targets, batch.size)])
    return _scored_of_loader(function, data, transform)


def _scored_of_loader(function: BatchFunction, data: Iterable[Any], transform: Transform | None) -> Iterator[Scored]:
    for found, asked in _ask(function, data, transform, targets=True):
        if isinstance(asked.given, Dataset):
            yield Scored(*_pair(found), asked.batch.size)
        elif (targets := as_arguments(asked.given)[1]) is not None:
            yield Scored(found, targets, asked.batch.size)
        else:
            raise ValueError("the batches of `data` must be (inputs, targets): there are no targets")


def _scored_of_dataset(function: BatchFunction, batch: Batch, transform: Transform | None) -> Scored:
    return Scored(*_pair(_outputs(function, batch, Predicted(transform, targets=True))), batch.size)


def _pair(found: Any) -> tuple[Any, Any]:
    if isinstance(found, list):
        return [output for output, _ in found], [target for _, target in found]
    outputs, targets = found
    return outputs, targets


def _is_batch(data: Any) -> bool:
    """Whether it is one batch, and not something that yields batches."""
    return isinstance(data, (torch.Tensor, np.ndarray, list, tuple, Mapping, Dataset)) or is_record(data)


def _read(function: BatchFunction, inputs: Any, targets: Any) -> Batch:
    readings = function.readings
    first = next(iter(readings.values()))
    collate = first.collate if None in readings else None
    return Batch((read_part(inputs, targets, None, Reading(collate, "mean", None, None, first.device)),))


def _outputs(function: BatchFunction, batch: Batch, predicted: Predicted) -> Any:
    return collect(function, Task(predicted, aside=True, train=False), batch)


def _check_any(found: Sequence[Any]) -> None:
    if not found:
        raise ValueError("there is no sample: the loader yields no batch")


def _check_transform(transform: Transform | None) -> None:
    if transform is not None:
        arguments.check_callable("transform", transform, ("outputs",))


def _joined(found: Sequence[tuple[Any, int]], what: str) -> Any:
    """What batches of so many samples have, as one: tensors one after the other, in their structure; or a list with one
    object a sample."""
    try:
        forms, tensors = zip(*(rows_form(item, samples) for item, samples in found), strict=True)
        bounds = [0, *accumulate(samples for _, samples in found)]
        form = common_form(dict(enumerate(forms)), bounds)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the {what} of the batches cannot be put together: {error}") from error
    if form.objects is not None:
        return form.objects
    return form.filled([torch.cat(columns) for columns in zip(*tensors, strict=True)])
