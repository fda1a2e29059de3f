"""Several runs of an optimizer from several starts, and the minima that they find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from batchopt.errors import NonFiniteError
from batchopt.evaluations import Evaluations
from batchopt.extending import choose_optimizer, closure, read_count
from batchopt.optim import Result
from batchopt.optim.minimizer import Minimizer

# Points whose distance is a smaller fraction of their length are one minimum.
SAME = 1e-3


class Run(NamedTuple):
    """A run from the start of that number: `at_start` and `f` are what its optimizer minimises, there and at its end;
    `result` is of its last step, if the optimizer is one of batchopt. `minimum` numbers the different ends, from the
    lowest one; None for a start from which no run was made."""

    start: int
    at_start: float
    f: float
    result: Result | None
    minimum: int | None


class Multistart(NamedTuple):
    """`runs`, the lowest one first; `points`, where they ended, a row for each (shape `(K, n)`, X's dtype). `print` of
    it is a table."""

    runs: list[Run]
    points: torch.Tensor

    def __str__(self) -> str:
        rows = [f"{'start':>6s}  {'f at start':>13s}  {'f':>13s}  {'evaluations':>11s}  minimum  ended"]
        for run in self.runs:
            counted, why = ("", "") if run.result is None else (run.result.evaluations, run.result.status.name.lower())
            end = ("", "not kept") if run.minimum is None else (run.minimum, why)
            rows.append(f"{run.start:6d}  {run.at_start:13.6g}  {run.f:13.6g}  {counted:>11}  {end[0]:>7}  {end[1]}")
        return "\n".join(rows)

    def __repr__(self) -> str:
        minima = len({run.minimum for run in self.runs} - {None})
        return f"Multistart({len(self.runs)} runs, {minima} minima, the lowest {self.runs[0].f:.6g})"


def multistart_of(
    opt: Evaluations,
    starts: Any,
    choice: Any,
    keep: int | None,
    steps: int,
    step: Callable[[torch.optim.Optimizer], float],
    is_stopped: Callable[[], bool],
) -> Multistart:
    """Run an optimizer of that choice from each of the best `keep` starts, and leave X at the lowest end; documented at
    `BatchOptimizer.multistart`."""
    read_count("steps", steps)
    most = None if keep is None else read_count("keep", keep)
    if choice is None or isinstance(choice, torch.optim.Optimizer):
        raise ValueError(
            "multistart makes an optimizer for each start: give it, or BatchOptimizer, a name, a class or a factory as "
            f"`optimizer`; got {'an instance' if choice is not None else 'None'}"
        )
    found = opt.evaluate_many(starts)
    if not len(found):
        raise ValueError("`starts` has no row: give at least one vector like `parameters`")
    points = torch.stack([torch.as_tensor(start) for start in starts]).to(opt.parameters, copy=True)
    l1 = choose_optimizer(choice, closure(opt).parameters).param_groups[0].get("l1", 0.0)  # type: ignore[union-attr]

    def minimised(at: torch.Tensor, f: torch.Tensor | None = None) -> list[float]:
        values: list[float] = (opt.evaluate_many(at) if f is None else f).add(at.abs().sum(1), alpha=l1).tolist()
        return values

    at_start, begun, before = minimised(points, found), points.clone(), opt.parameters.clone()
    finite = [i for i in sorted(range(len(points)), key=lambda i: (at_start[i], i)) if math.isfinite(at_start[i])]
    if not finite:
        raise ValueError("f is not finite at any of the starts: give at least one where it is")
    results: dict[int, Result | None] = {}
    buffers = {-1: _copies(opt)}  # at the start of each run; and as it has left them
    try:
        for i in sorted(finite[:most]):
            opt.parameters.copy_(points[i])
            _write(opt, buffers[-1])
            results[i] = _run(opt, choice, steps, step, is_stopped)
            points[i], buffers[i] = opt.parameters, _copies(opt)
            if is_stopped():
                break
        ends = minimised(points)
        for i in [i for i in results if not math.isfinite(ends[i])]:
            points[i], ends[i] = begun[i], at_start[i]
        order = sorted(range(len(points)), key=lambda i: (ends[i], i))
        minima = _minima(points, ends, [i for i in order if i in results], minimised)
        opt.parameters.copy_(points[order[0]])
        opt.evaluate()
        _write(opt, buffers.get(order[0], buffers[-1]))
    except BaseException:
        opt.parameters.copy_(before)
        _write(opt, buffers[-1])
        raise
    return Multistart([Run(i, at_start[i], ends[i], results.get(i), minima.get(i)) for i in order], points[order])


def _copies(opt: Evaluations) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in opt.module.buffers()]


def _write(opt: Evaluations, buffers: list[torch.Tensor]) -> None:
    for buffer, values in zip(opt.module.buffers(), buffers, strict=True):
        buffer.copy_(values)


def _run(
    opt: Evaluations,
    choice: Any,
    steps: int,
    step: Callable[[torch.optim.Optimizer], float],
    is_stopped: Callable[[], bool],
) -> Result | None:
    optimizer = choose_optimizer(choice, closure(opt).parameters)
    assert optimizer is not None
    for _ in range(steps):
        try:
            step(optimizer)
        except NonFiniteError:
            break
        if is_stopped():
            break
    return optimizer.result if isinstance(optimizer, Minimizer) else None


def _minima(
    points: torch.Tensor, ends: Sequence[float], order: Sequence[int], minimised: Callable[[torch.Tensor], list[float]]
) -> dict[int, int | None]:
    """Return the number of the minimum of each end, the lowest first: that of the first one which is close, or to which
    nothing higher than the ends leads half way, as in a flat direction."""
    found: list[int] = []
    numbers: dict[int, int | None] = {}
    for i in order:
        between = minimised((points[found] + points[i]) / 2) if found else []
        rounding = 4 * torch.finfo(points.dtype).eps * abs(ends[i])
        for number, j in enumerate(found):
            apart, length = (points[i] - points[j]).norm(), torch.maximum(points[i].norm(), points[j].norm())
            if bool(apart <= SAME * length) or between[number] <= ends[i] + rounding:
                numbers[i] = number
                break
        else:
            numbers[i] = len(found)
            found.append(i)
    return numbers
