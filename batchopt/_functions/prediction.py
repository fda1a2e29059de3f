"""The module's outputs for data of any size, and metrics of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from batchopt._data import arguments
from batchopt._data.batches import BatchSpec, read_part
from batchopt._data.prefetch import Ahead, as_arguments
from batchopt._engine.engine import Engine
from batchopt._engine.prepared import ReadsAhead, whole
from batchopt._functions.tasks import collect, of_each, select
from batchopt._mapreduce.answers import common_form
from batchopt_workers.batch.batch import Batch
from batchopt_workers.functions.forms import rows_form
from batchopt_workers.functions.task import Predicted, Task
from batchopt_workers.wire.structures import is_record

Transform = Callable[[Any], Any]


class _Asked(NamedTuple):
    """A batch to predict: as given by the user, and as sent to workers."""

    given: Any
    batch: Batch


def predict(engine: Engine, data: Any, transform: Transform | None) -> Any:
    """Return the outputs for all of `data`, in order: one batch of inputs, or those of a loader; None: the loaded
    batch, by term where there are terms."""
    arguments.check_callable("transform", transform)
    engine.resync()
    if data is None:
        selections = select(engine, None, None, engine.specs)
        return of_each(selections, lambda s: collect(engine, s.task(Predicted(transform), False), s.batch))
    if _is_batch(data):
        return _outputs(engine, _read(engine, data, None), Predicted(transform))
    batches = [(outputs, asked.batch.size) for outputs, asked in _ask(engine, data, transform)]
    _check_any(batches)
    return _joined(batches, "outputs")


def iter_predict(engine: Engine, batches: Iterable[Any], transform: Transform | None) -> Iterator[tuple[Any, Any]]:
    """Iterate over the outputs for each of `batches`, with the batch, while the next one is read."""
    arguments.check_callable("transform", transform)
    engine.resync()
    if _is_batch(batches):
        raise TypeError(
            f"`batches` must be a loader, or anything else that yields batches; got {type(batches).__name__}: "
            "predict(inputs) takes one batch"
        )
    return ((found, asked.given) for found, asked in _ask(engine, batches, transform))


def _ask(
    engine: Engine, batches: Iterable[Any], transform: Transform | None, targets: bool = False
) -> Iterator[tuple[Any, _Asked]]:
    """Yield the outputs for each batch; with `targets` also the targets that workers read from a dataset."""

    def read(given: Any) -> _Asked:
        return _Asked(given, _read(engine, *as_arguments(given)[:2]))

    ahead = Ahead(whole(batches), read)
    for asked in ahead:
        with engine.observers.including(ReadsAhead(ahead)):
            predicted = Predicted(transform, targets=targets and isinstance(asked.given, Dataset))
            found = _outputs(engine, asked.batch, predicted)
        yield found, asked


class Scored(NamedTuple):
    """The outputs and targets of a batch with this number of samples."""

    outputs: Any
    targets: Any
    samples: int


class Scoring:
    """An iterable over `Scored` batches of data, with the metrics of all of them."""

    def __init__(self, engine: Engine, data: Any, metrics: Any, transform: Transform | None) -> None:
        """Raises `TypeError` for anything but metrics; None: there are none."""
        arguments.check_callable("transform", transform)
        self._engine, self._data, self._transform = engine, data, transform
        self._measures = {} if metrics is None or metrics == {} else read_metrics(metrics)
        self._found: list[Scored] = []  # of an iteration that is not over
        self._values: Any = {}
        self._is_over = not self._measures

    def __iter__(self) -> Iterator[Scored]:
        self._found, self._is_over = [], not self._measures
        for batch in scored(self._engine, self._data, self._transform):
            if self._measures:
                self._found.append(batch)
            yield batch
        if self._measures:
            self._values, self._found, self._is_over = measured(self._measures, self._found), [], True

    @property
    def values(self) -> Any:
        """The metrics of all batches of the last iteration, or of those so far, as `score` returns them; an empty dict
        without metrics. Raises `ValueError` if there was no batch."""
        return self._values if self._is_over else measured(self._measures, self._found)


def score(engine: Engine, data: Any, metrics: Any, transform: Transform | None) -> Any:
    """Return each metric of all outputs and targets, by name; for a metric without a name, its value."""
    measures = read_metrics(metrics)
    return measured(measures, list(scored(engine, data, transform)))


def measured(measures: Mapping[str, Measure], found: Sequence[Scored]) -> Any:
    """Return each metric of the outputs and targets of all batches together."""
    _check_any(found)
    if len(found) == 1:
        return values(measures, *found[0][:2])
    outputs = _joined([(batch.outputs, batch.samples) for batch in found], "outputs")
    return values(measures, outputs, _joined([(batch.targets, batch.samples) for batch in found], "targets"))


def scored(engine: Engine, data: Any, transform: Transform | None) -> Iterator[Scored]:
    """Iterate over the outputs and targets of `data`: one batch, or each batch of a loader, reading ahead."""
    arguments.check_callable("transform", transform)
    engine.resync()
    if isinstance(data, Dataset) and not isinstance(data, Iterator):
        batch = _read(engine, data, None)
        found = _outputs(engine, batch, Predicted(transform, targets=True))
        return iter([Scored(*_pair(found), batch.size)])
    if _is_batch(data):
        inputs, targets, _ = as_arguments(data)
        if targets is None:
            raise ValueError("`data` must be (inputs, targets), a loader of such, or a dataset: there are no targets")
        batch = _read(engine, inputs, targets)
        return iter([Scored(_outputs(engine, batch, Predicted(transform)), targets, batch.size)])
    return _scored_of_loader(engine, data, transform)


def _scored_of_loader(engine: Engine, data: Iterable[Any], transform: Transform | None) -> Iterator[Scored]:
    for found, asked in _ask(engine, data, transform, targets=True):
        if isinstance(asked.given, Dataset):
            yield Scored(*_pair(found), asked.batch.size)
        elif (targets := as_arguments(asked.given)[1]) is not None:
            yield Scored(found, targets, asked.batch.size)
        else:
            raise ValueError("the batches of `data` must be (inputs, targets): there are no targets")


def _pair(found: Any) -> tuple[Any, Any]:
    if isinstance(found, list):
        return [output for output, _ in found], [target for _, target in found]
    outputs, targets = found
    return outputs, targets


def _is_batch(data: Any) -> bool:
    """Tell whether it is one batch, as opposed to an iterable of batches."""
    return isinstance(data, (torch.Tensor, np.ndarray, list, tuple, Mapping, Dataset)) or is_record(data)


def _read(engine: Engine, inputs: Any, targets: Any) -> Batch:
    specs = engine.specs
    first = next(iter(specs.values()))
    collate = first.collate if None in specs else None
    return Batch((read_part(inputs, targets, None, BatchSpec(collate, "mean", None, None, first.device)),))


def _outputs(engine: Engine, batch: Batch, predicted: Predicted) -> Any:
    return collect(engine, Task(predicted, aside=True, train=False), batch)


def _check_any(found: Sequence[Any]) -> None:
    if not found:
        raise ValueError("the loader yielded no batches")


def _joined(found: Sequence[tuple[Any, int]], what: str) -> Any:
    """Concatenate the results of batches with these numbers of samples: tensors in their structure, or a list with one
    object per sample."""
    try:
        forms, tensors = zip(*(rows_form(item, samples) for item, samples in found), strict=True)
        bounds = [0, *accumulate(samples for _, samples in found)]
        form = common_form(dict(enumerate(forms)), bounds)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the {what} of the batches cannot be put together: {error}") from error
    if form.objects is not None:
        return form.objects
    return form.filled([torch.cat(columns) for columns in zip(*tensors, strict=True)])


# Computes a metric of all outputs and targets in a single call.
Measure = Callable[[Any, Any], Any]

# The name of a metric given without one.
ALONE = ""

# First parameters of scikit-learn's functions that compare targets with predictions.
_TRUTHS = ("y_true", "labels_true", "y1")

_ACCEPTED = (
    "a metric is a function metric(outputs, targets), an object with update(outputs, targets), compute() and reset(), "
    "a Metric of ignite, or a function of sklearn.metrics"
)


def read_metrics(metrics: Any) -> dict[str, Measure]:
    """Return the measures of one metric, under the name `ALONE`, or of a dict of metrics, by name. Raises `TypeError`
    for anything but metrics, and `ValueError` for an empty dict."""
    if not isinstance(metrics, Mapping):
        return {ALONE: _measure(metrics, "`metrics`")}
    if not metrics:
        raise ValueError("`metrics` is empty: give a metric, or a dict of metrics by name")
    for name in metrics:
        if not isinstance(name, str) or name == ALONE:
            raise TypeError(f"the names of `metrics` must be strings that are not empty; got {name!r}")
    return {name: _measure(metric, f"`metrics[{name!r}]`") for name, metric in metrics.items()}


def values(measures: Mapping[str, Measure], outputs: Any, targets: Any) -> Any:
    """Return the value of each measure by name, a float if it is one number; for a metric given without a name, its
    value."""
    found = {name: _as_float(measure(outputs, targets)) for name, measure in measures.items()}
    return found[ALONE] if ALONE in found else found


def _measure(metric: Any, where: str) -> Measure:
    """Return the measure of one metric; `where` names it in errors. An object is reset first, and keeps its state."""
    if isinstance(metric, list | tuple):
        raise TypeError(f"{where} is a {type(metric).__name__}: give a dict, with a name for each metric")
    if isinstance(metric, type):
        raise TypeError(f"{where} is a class, not a metric: make an object of it, {metric.__name__}(...)")
    if _is_of_ignite(metric):
        return functools.partial(_by_engine, metric)
    if _has_methods(metric):
        return functools.partial(_by_update, metric)
    function = metric.func if isinstance(metric, functools.partial) else metric
    if _is_within("sklearn.metrics", getattr(function, "__module__", None)):
        _check_of_sklearn(function, where)
        return lambda outputs, targets: metric(_as_array(targets), _as_array(outputs))
    if not callable(metric):
        raise TypeError(f"{where} is not a metric: got {metric!r} of type {type(metric).__name__}; {_ACCEPTED}")
    return metric  # type: ignore[no-any-return]


def _is_of_ignite(metric: Any) -> bool:
    """Tell whether it is an ignite Metric, which delegates attributes that it lacks to its value."""
    return any(_is_within("ignite.metrics", base.__module__) for base in type(metric).__mro__)


def _has_methods(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _is_within(package: str, module: str | None) -> bool:
    return module is not None and f"{module}.".startswith(f"{package}.")


def _check_of_sklearn(function: Any, where: str) -> None:
    """Raise `TypeError` unless this function compares targets with predictions."""
    if not inspect.isfunction(function):
        raise TypeError(
            f"{where} is a scorer of scikit-learn, {function!r}, which asks an estimator for predictions: give the "
            "function that it is made of, as sklearn.metrics.f1_score or functools.partial(f1_score, average='macro')"
        )
    first = next(iter(inspect.signature(function).parameters), None)
    if first not in _TRUTHS:
        raise TypeError(
            f"{where} is sklearn's {function.__name__}, which does not begin with y_true: say what it is to be given, "
            f"as lambda outputs, targets: {function.__name__}(...)"
        )


def _by_update(metric: Any, outputs: Any, targets: Any) -> Any:
    metric.reset()
    metric.update(outputs, targets)
    return metric.compute()


def _by_engine(metric: Any, outputs: Any, targets: Any) -> Any:
    """Compute by an engine of one iteration, so that `output_transform` and metric arithmetic work as in ignite."""
    from ignite.engine import Engine

    metric.reset()
    engine = Engine(lambda *_: (outputs, targets))
    metric.attach(engine, ALONE)
    try:
        found = engine.run([None]).metrics
    finally:
        metric.detach(engine)
    return found.get(ALONE, found)  # a metric that returns a dict may be stored entry by entry


def _as_array(values: Any) -> Any:
    """Convert a tensor to a NumPy array (bfloat16, unknown to NumPy, to float32); return others unchanged."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _as_float(value: Any) -> Any:
    """Convert a real number of any type to a float; return anything else unchanged."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not value.ndim:
        value = value.item()
    return float(value) if isinstance(value, int | float) else value
