"""Hessian products, gradients with respect to inputs, f at points other than X, and the gradient of many batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from batchopt._data.arguments import read_bool, read_columns, read_floating
from batchopt._data.batches import BatchSpec, with_samples
from batchopt._engine.engine import Engine
from batchopt._engine.prepared import prepared, whole
from batchopt._functions.tasks import collect, of_each, select, total
from batchopt._mapreduce.reduce import weighed
from batchopt.backends.base import Prepared
from batchopt.errors import NonFiniteError
from batchopt_workers.batch.batch import Batch, Columns, Part
from batchopt_workers.batch.items import Items
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.functions.derivatives import (
    AtPoints,
    HessianProducts,
    InputGradients,
    TermGradients,
    refuse_varying,
)
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.structures import all_finite


def check_exact(engine: Engine, what: str) -> None:
    """Raise `ValueError` where gradients are compressed, since `what` needs exact ones."""
    if engine.rules.compresses:
        raise ValueError(
            f"{what} is exact, or compares gradients with each other, and here they are compressed: build another "
            "BatchOptimizer without `compress` for it"
        )


def hessian_products(engine: Engine, v: Any) -> torch.Tensor:
    """Return the Hessian of f times a vector, shape `(n,)`, or times each column of a matrix, shape `(n, k)`."""
    check_exact(engine, "hvp()")
    size = len(engine.parameters)
    read_columns(read_floating("v", v, f", shape ({size},) or ({size}, k)"), size)
    batch, x = engine.current_step().batch, engine.subject.x
    directions = v.detach().to("cpu", x.dtype).reshape(size, -1).T.contiguous()
    finite = directions.isfinite().all(dim=1)
    count = int(finite.sum())
    if count == len(directions) > 0:
        products = _products(engine, batch, directions)
    else:
        products = torch.full_like(directions, math.nan)
        if count:
            products[finite] = _products(engine, batch, directions[finite])
    engine.count_products(count)
    return products.T.reshape(v.shape).to(x.device)


def _check_graph(engine: Engine) -> None:
    """Raise `ValueError` if f has no second derivative, which then is NaN, since its first one is of finite
    differences."""
    if engine.settings.by_differences(engine.subject.module):
        raise ValueError(
            "hvp() differentiates the gradient, and part of it is of finite differences (finite_differences), which "
            "have no derivative: use gauss_newton(v) for a sum of squares"
        )


def _products(engine: Engine, batch: Batch, directions: torch.Tensor) -> torch.Tensor:
    """Return the product of the Hessian with each of these rows."""
    began, task = time.perf_counter(), Task(HessianProducts(directions), term=None)
    try:
        found: torch.Tensor = total(engine, task, batch, "Hessian-vector product")
    except NonFiniteError:
        _check_graph(engine)
        raise
    if not found.isfinite().all():
        _check_graph(engine)
    engine.observers.did("product", began)
    return found.to(directions.dtype)


def term_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the gradient of each term, with its weight, by name: shape `(n,)`, X's dtype. Raises `ValueError` if
    there are no terms."""
    check_exact(engine, "term_gradients()")
    batch, terms, x = engine.current_step().batch, engine.reader.terms, engine.subject.x
    if terms is None:
        raise ValueError("there are no terms: the gradient of f is `grad_parameters`, after evaluate()")
    found = total(engine, Task(TermGradients(len(terms)), term=None), batch, "gradient of a term")
    return dict(zip(terms, found.to(x), strict=True))


def input_gradients(engine: Engine, inputs: Any, targets: Any) -> Any:
    """Return df/d(inputs) in sample order; by term where there are terms."""
    specs = with_samples(engine.specs)
    selections = select(engine, inputs, targets, specs)
    tasks = {s.name: s.task(_input_gradients(specs[s.name], s.batch.parts[0])) for s in selections}
    return of_each(selections, lambda s: collect(engine, tasks[s.name], engine.weighed(Prepared(s.batch)).batch))


def _input_gradients(spec: BatchSpec, part: Part) -> InputGradients:
    """Return the function to collect. Raises `ValueError` if `denominators` depends on the inputs differentiably."""
    if spec.denominators is None or spec.reduction == "sum":
        return InputGradients()
    if isinstance(part.inputs, Items):
        return InputGradients(spec.denominators)
    refuse_varying(spec.denominators, part.inputs.slice(0, 1), part.targets and part.targets.slice(0, 1))
    return InputGradients()


def evaluate_many(engine: Engine, points: Any, gradients: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return f of the loaded batch at each of the `points` (shape `(K, n)`): shape `(K,)`, float64, infinity where it
    is not finite; with `gradients` also df/dX at each, shape `(K, n)`, X's dtype."""
    step, x = engine.current_step(), engine.subject.x
    read_bool("gradients", gradients)
    at = _read_points(points, x)
    if not len(at):
        nothing = torch.empty(0, dtype=torch.float64)
        return (nothing, at) if gradients else nothing
    part = Part(Columns(at), None, None, Weighting("mean", len(at)))
    at_points = AtPoints(step.plan.cut, gradients, len(step.weights), engine.settings.kinds_as_infinite)
    task = Task(at_points, aside=True, whole=True)
    found = collect(engine, task, Batch((part,)), Cut(range(len(at) + 1)))
    f = torch.tensor([weighed(losses, step.weights) for losses in found["losses"].tolist()], dtype=torch.float64)
    if not gradients:
        return f.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=math.inf)
    slopes = found["gradients"].to(x.dtype)
    f[torch.tensor([not all_finite(slope) for slope in slopes])] = math.inf
    return f.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=math.inf), slopes


def _read_points(points: Any, x: torch.Tensor) -> torch.Tensor:
    """Return one row per point, in X's dtype. Raises `TypeError` or `ValueError`."""
    if isinstance(points, (list, tuple)) and points:
        points = torch.stack([torch.as_tensor(point) for point in points])
    elif isinstance(points, np.ndarray):
        points = torch.as_tensor(points)
    rows = read_floating("points", points, f", shape (K, {len(x)})")
    if rows.dim() != 2 or rows.shape[1] != len(x):
        raise ValueError(
            f"`points` must have shape (K, {len(x)}), one vector like `parameters` a row; got {tuple(rows.shape)}"
        )
    return rows.detach().to(x.dtype).contiguous()


class Total:
    """The float64 sum over batches, in their order; a mean is weighted by its divisor."""

    def __init__(self, x: torch.Tensor) -> None:
        """Start at zero, for gradients like `x`: shape `(n,)`."""
        self._loss, self._divisor = 0.0, 0.0
        self._gradient = torch.zeros_like(x, dtype=torch.float64)
        self._dtype = x.dtype

    def add(self, loss: float, gradient: torch.Tensor, weighting: Weighting) -> None:
        """Add f and df/dX (shape `(n,)`) of a batch with this weighting."""
        self._loss += weighting.divisor * loss
        self._gradient.add_(gradient, alpha=weighting.divisor)
        self._divisor = 1.0 if weighting.reduction == "sum" else self._divisor + weighting.divisor

    def whole(self) -> tuple[float, torch.Tensor]:
        """Return f and df/dX (in the dtype of `x`) of all batches. Raises `ValueError` if no sample counts."""
        if not self._divisor:
            raise ValueError("there is no sample that counts: no batch, or the denominators of all samples are 0")
        return self._loss / self._divisor, (self._gradient / self._divisor).to(self._dtype)


def full_gradient(
    engine: Engine,
    data: Iterable[Any],
    evaluate: Callable[[], torch.Tensor],
    convert: Callable[[Any], Any] | None,
) -> tuple[float, torch.Tensor]:
    """Return f and df/dX of all batches of `data` together; documented at `BatchOptimizer.full_gradient`."""
    check_exact(engine, "full_gradient()")
    subject, total = engine.subject, Total(engine.subject.x)
    sampled = with_samples(engine.specs)
    if len(sampled) != 1 or (len(engine.specs) > 1 and next(iter(sampled.values())).reduction == "sum"):
        raise ValueError(
            "full_gradient needs an objective of one term, and penalties only beside a mean: means of several divide "
            f"by different denominators. The terms are {[*engine.specs]}: load all data at once and call evaluate()"
        )

    def add(prepared: Prepared) -> None:
        prepared = engine.weighed(prepared)
        (part,) = [part for part in prepared.batch.parts if part.name in sampled]
        if _counts(part.weighting):
            engine.begin(prepared)
            total.add(evaluate().item(), subject.gradient, part.weighting)

    with engine.examining("full_gradient()", counted=True):
        for batch in prepared(engine, whole(data, convert)):
            add(batch.take(engine))
        found = total.whole()
    subject.gradient.copy_(found[1])
    subject.show_gradients()
    return found


def _counts(weighting: Weighting) -> bool:
    """Tell whether any sample counts. Raises `ValueError` if none does and the batch nevertheless has a loss."""
    if weighting.divided_once and not weighting.divisor:
        raise ValueError(
            "the class weights of all targets of a batch are 0, and with label smoothing it has a loss all the same, "
            "which no mean of it says: make the batches larger, or leave those samples out"
        )
    return bool(weighting.divisor)
