"""Metrics of all outputs and targets of a data set: functions, and those of torchmetrics, ignite and scikit-learn.

None of these libraries is imported: a metric is recognised by the names of its class, and it brings its library along.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# metric(outputs, targets), for a metric of some kind.
Compute = Callable[[Any, Any, Any], Any]

# The name of a metric that is given without one.
ALONE = ""

# The first parameters of scikit-learn's functions that compare what is true with what was predicted.
_TRUTHS = ("y_true", "labels_true", "y1")

_ACCEPTED = (
    "a metric is a function metric(outputs, targets), an object with update(outputs, targets), compute() and reset(), "
    "a Metric of ignite, or a function of sklearn.metrics"
)


@dataclass(frozen=True)
class Measure:
    """A user's metric, and how metrics of its kind are computed."""

    metric: Any
    compute: Compute

    def of(self, outputs: Any, targets: Any) -> Any:
        """The metric of all `outputs` and `targets`, given to it at once: a float if it is one number, else what the
        metric returns. An object is reset before, and left as its `compute` leaves it."""
        return _as_float(self.compute(self.metric, outputs, targets))


def read_metrics(metrics: Any) -> dict[str, Measure]:
    """The measures of one metric, under the name `ALONE`, or of a dict of metrics, under their names.

    Raises `TypeError` for what is no metric, and `ValueError` for a dict without any.
    """
    if not isinstance(metrics, Mapping):
        return {ALONE: _read(metrics, "`metrics`")}
    if not metrics:
        raise ValueError("`metrics` is empty: give a metric, or a dict of metrics by name")
    for name in metrics:
        if not isinstance(name, str) or name == ALONE:
            raise TypeError(f"the names of `metrics` must be strings that are not empty; got {name!r}")
    return {name: _read(metric, f"`metrics[{name!r}]`") for name, metric in metrics.items()}


def values(measures: Mapping[str, Measure], outputs: Any, targets: Any) -> Any:
    """The value of each measure by name; of a metric that was given without a name, its value."""
    found = {name: measure.of(outputs, targets) for name, measure in measures.items()}
    return found[ALONE] if ALONE in found else found


# ---- reading


def _read(metric: Any, where: str) -> Measure:
    """The measure of one metric; `where` names it in errors."""
    if isinstance(metric, list | tuple):
        raise TypeError(f"{where} is a {type(metric).__name__}: give a dict, with a name for each metric")
    if isinstance(metric, type):
        raise TypeError(f"{where} is a class, not a metric: make an object of it, {metric.__name__}(...)")
    if _is_of_ignite(metric):
        return Measure(metric, _by_ignite)
    if _has_methods(metric):
        return Measure(metric, _by_methods)
    function = metric.func if isinstance(metric, functools.partial) else metric
    if _is_within("sklearn.metrics", getattr(function, "__module__", None)):
        _check_of_sklearn(function, where)
        return Measure(metric, _by_sklearn)
    if not callable(metric):
        raise TypeError(f"{where} is no metric, but {metric!r} of type {type(metric).__name__}: {_ACCEPTED}")
    return Measure(metric, _by_call)


def _is_of_ignite(metric: Any) -> bool:
    """Whether it is a Metric of ignite, which seems to have any method: what it lacks is taken for one of its value."""
    return any(_is_within("ignite.metrics", base.__module__) for base in type(metric).__mro__)


def _has_methods(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _is_within(package: str, module: str | None) -> bool:
    return module is not None and f"{module}.".startswith(f"{package}.")


def _check_of_sklearn(function: Any, where: str) -> None:
    """Raise `TypeError` unless this compares targets with predictions."""
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


# ---- computing


def _by_call(metric: Any, outputs: Any, targets: Any) -> Any:
    return metric(outputs, targets)


def _by_methods(metric: Any, outputs: Any, targets: Any) -> Any:
    metric.reset()
    metric.update(outputs, targets)
    return metric.compute()


def _by_ignite(metric: Any, outputs: Any, targets: Any) -> Any:
    """By an engine of one iteration: so `output_transform` and arithmetic of metrics mean what they mean there."""
    from ignite.engine import Engine

    metric.reset()
    engine = Engine(lambda *_: (outputs, targets))
    metric.attach(engine, ALONE)
    try:
        found = engine.run([None]).metrics
    finally:
        metric.detach(engine)
    return found.get(ALONE, found)  # a metric that returns a dict may be there entry by entry


def _by_sklearn(metric: Any, outputs: Any, targets: Any) -> Any:
    return metric(_as_array(targets), _as_array(outputs))


def _as_array(values: Any) -> Any:
    """A tensor as an array of NumPy, which has no bfloat16; anything else as it is."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _as_float(value: Any) -> Any:
    """A real number, in whatever form, as a float; anything else as it is."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not value.ndim:
        value = value.item()
    return float(value) if isinstance(value, int | float) else value
