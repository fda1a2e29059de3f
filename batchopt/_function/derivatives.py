"""Hessian products, gradients with respect to inputs, and f at points other than X."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from batchopt._data.arguments import read_bool
from batchopt._data.batches import Reading
from batchopt._function.function import BatchFunction
from batchopt._function.tasks import collect, select, total
from batchopt._mapreduce.reduce import all_finite, weighed
from batchopt_workers.data.batch import Batch, Columns, Part
from batchopt_workers.data.items import Items
from batchopt_workers.map.derivatives import AtPoints, HessianProducts, InputGradients, refuse_varying
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process.messages import Cut
from batchopt_workers.tasks.task import Task


def hessian_products(function: BatchFunction, v: Any) -> torch.Tensor:
    """Return the Hessian of f times a vector, shape `(n,)`, or times each column of a matrix, shape `(n, k)`."""
    function.check_exact("hvp()")
    size = len(function.parameters)
    if not isinstance(v, torch.Tensor) or not v.is_floating_point():
        given = f"a tensor of {v.dtype}" if isinstance(v, torch.Tensor) else type(v).__name__
        raise TypeError(f"`v` must be a tensor of floating-point numbers, shape ({size},) or ({size}, k); got {given}")
    if v.shape[:1] != (size,) or v.dim() > 2:
        raise ValueError(f"`v` must have shape ({size},), as `parameters`, or ({size}, k); got {tuple(v.shape)}")
    return function.hvp(v) if v.dim() == 1 else _block(function, v)


def _block(function: BatchFunction, v: torch.Tensor) -> torch.Tensor:
    batch, x = function.ready().batch, function.subject.x
    directions = v.detach().to(x.dtype).T.contiguous()
    products = torch.full_like(directions, math.nan)
    finite = directions.isfinite().all(dim=1)
    if finite.any():
        task = Task(HessianProducts(directions[finite]), term=None)
        products[finite] = total(function, task, batch, "Hessian-vector product").to(x.dtype)
        function.count_products(int(finite.sum()))
    return products.T


def input_gradients(function: BatchFunction, inputs: Any, targets: Any) -> Any:
    """Return df/d(inputs) in sample order; by term where there are terms."""
    readings = function.readings
    selections = select(function, inputs, targets, readings)
    tasks = [s.task(_input_gradients(readings[s.name], s.batch.parts[0])) for s in selections]
    found = {
        s.name: collect(function, task, function.with_denominators(s.batch))
        for s, task in zip(selections, tasks, strict=True)
    }
    return found[None] if None in found else found


def _input_gradients(reading: Reading, part: Part) -> InputGradients:
    """Return the function to collect. Raises `ValueError` if `denominators` depends on the inputs differentiably."""
    if reading.denominators is None or reading.reduction == "sum":
        return InputGradients()
    if isinstance(part.inputs, Items):
        return InputGradients(reading.denominators)
    refuse_varying(reading.denominators, part.inputs.slice(0, 1), part.targets and part.targets.slice(0, 1))
    return InputGradients()


def evaluate_many(
    function: BatchFunction, points: Any, gradients: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return f of the loaded batch at each of the `points` (shape `(K, n)`): shape `(K,)`, float64, infinity where it
    is not finite; with `gradients` also df/dX at each, shape `(K, n)`, X's dtype."""
    step, x = function.ready(), function.subject.x
    read_bool("gradients", gradients)
    at = _read_points(points, x)
    if not len(at):
        nothing = torch.empty(0, dtype=torch.float64)
        return (nothing, at) if gradients else nothing
    part = Part(Columns(at), None, None, Weighting("mean", len(at)))
    at_points = AtPoints(step.plan.cut, gradients, len(step.weights), function.settings.kinds_as_infinite)
    task = Task(at_points, aside=True, whole=True)
    found = collect(function, task, Batch((part,)), Cut(range(len(at) + 1)))
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
    if not isinstance(points, torch.Tensor) or not points.is_floating_point():
        given = f"a tensor of {points.dtype}" if isinstance(points, torch.Tensor) else type(points).__name__
        raise TypeError(f"`points` must be a tensor of floating-point numbers, shape (K, {len(x)}); got {given}")
    if points.dim() != 2 or points.shape[1] != len(x):
        raise ValueError(
            f"`points` must have shape (K, {len(x)}), one vector like `parameters` a row; got {tuple(points.shape)}"
        )
    return points.detach().to(x.dtype).contiguous()
