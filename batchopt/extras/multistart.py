"""Several runs of an optimizer from several starts, and the minima that they find."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from batchopt.extending import read_count
from batchopt.optim import LevenbergMarquardt, Result
from batchopt.optim.choose import choose_optimizer
from batchopt.optim.minimizer import Minimizer

if TYPE_CHECKING:
    from batchopt.optimizer import BatchOptimizer

# Points whose distance is a smaller fraction of their length are one minimum.
SAME = 1e-3


class Run(NamedTuple):
    """A run from the start of that number: f there, f at its end and the `result` of its last step, if the optimizer is
    one of batchopt. `minimum` numbers the different ends, from the lowest one; None for a start that was not kept."""

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


def multistart_of(opt: BatchOptimizer, starts: Any, choice: Any, keep: int | None, steps: int) -> Multistart:
    """Run an optimizer of that choice from each of the best `keep` starts, and leave X at the lowest end; documented at
    `BatchOptimizer.multistart`."""
    read_count("steps", steps)
    if choice is None or isinstance(choice, torch.optim.Optimizer):
        raise ValueError(
            "multistart makes an optimizer for each start: give it, or BatchOptimizer, a name, a class or a factory as "
            f"`optimizer`; got {'an instance' if choice is not None else 'None'}"
        )
    at_start = opt.evaluate_many(starts)
    assert isinstance(at_start, torch.Tensor)
    count = len(at_start)
    if not count:
        raise ValueError("`starts` has no row: give at least one vector like `parameters`")
    points = torch.stack([torch.as_tensor(start) for start in starts]).to(opt.parameters, copy=True)
    order = sorted(range(count), key=lambda i: (float(at_start[i]), i))
    kept = sorted(order[: count if keep is None else read_count("keep", keep)])
    before = opt.parameters.clone()
    try:
        results = _run(opt, points, kept, choice, steps)
    except BaseException:
        opt.parameters.copy_(before)
        raise
    ends = opt.evaluate_many(points)
    assert isinstance(ends, torch.Tensor)
    order = sorted(range(count), key=lambda i: (float(ends[i]), i))
    opt.parameters.copy_(points[order[0]])
    ended = [i for i in order if i in results]
    minima = dict(zip(ended, _minima(points[ended]), strict=True))
    runs = [Run(i, float(at_start[i]), float(ends[i]), results.get(i), minima.get(i)) for i in order]
    return Multistart(runs, points[order])


def _run(
    opt: BatchOptimizer, points: torch.Tensor, kept: Sequence[int], choice: Any, steps: int
) -> dict[int, Result | None]:
    """Run from these rows of `points`, which become the ends; return the result of each, by its number.

    Where there are as many runs as workers, each worker evaluates whole points of some runs, so that nothing has to be
    coordinated; else all workers evaluate the points of one run. The bits are the same. Normal equations, which
    Levenberg-Marquardt needs, are made only in the second way.
    """
    parameters = list(opt.closure.parameters)
    first = choose_optimizer(choice, parameters)
    workers = len(opt.workers)
    if not isinstance(first, LevenbergMarquardt) and 1 < workers <= len(kept) and not _has_complex(parameters):
        return _together(opt, points, kept, choice, steps)
    results = {}
    for i in kept:
        opt.parameters.copy_(points[i])
        optimizer = choose_optimizer(choice, parameters)
        assert optimizer is not None
        for _ in range(steps):
            optimizer.step(opt.closure)  # type: ignore[arg-type]
        results[i] = _result(optimizer)
        points[i] = opt.parameters
    return results


def _has_complex(parameters: Sequence[torch.Tensor]) -> bool:
    return any(parameter.is_complex() for parameter in parameters)


def _result(optimizer: torch.optim.Optimizer) -> Result | None:
    return optimizer.result if isinstance(optimizer, Minimizer) else None


def _minima(points: torch.Tensor) -> Iterator[int]:
    """Yield for each point, the lowest first, the number of its minimum: that of the first one close to it."""
    found: list[torch.Tensor] = []
    for point in points.double():
        for number, other in enumerate(found):
            if bool((point - other).norm() <= SAME * torch.maximum(point.norm(), other.norm())):
                yield number
                break
        else:
            yield len(found)
            found.append(point)


# ---- runs whose points are evaluated together


class _Abandoned(BaseException):
    """Ends a run from inside its closure."""


class _Walker:
    """An optimizer in a thread of its own, over parameters of its own; it goes on only in `until_next`, while the other
    ones wait."""

    def __init__(self, like: Sequence[torch.nn.Parameter], point: torch.Tensor, choice: Any, steps: int) -> None:
        self._parameters = [torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in like]
        self._write(point)
        self._optimizer = choose_optimizer(choice, self._parameters)
        self._steps = steps
        self._answers: SimpleQueue[tuple[torch.Tensor, torch.Tensor] | None] = SimpleQueue()
        self._questions: SimpleQueue[torch.Tensor | BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="batchopt multistart", daemon=True)
        self._thread.start()

    @property
    def result(self) -> Result | None:
        """The result of the last step."""
        assert self._optimizer is not None
        return _result(self._optimizer)

    def point(self) -> torch.Tensor:
        """Return the parameters as a vector."""
        return torch.nn.utils.parameters_to_vector(self._parameters).detach()

    def until_next(self, answer: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor | None:
        """Return the next point at which f and df/dX are wanted, given those of the last one; None at the end."""
        if answer is not None:
            self._answers.put(answer)
        asked = self._questions.get()
        if isinstance(asked, BaseException):
            raise asked
        return asked

    def abandon(self) -> None:
        """End it, if it has not ended."""
        self._answers.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            for _ in range(self._steps):
                assert self._optimizer is not None
                self._optimizer.step(self._closure)  # type: ignore[arg-type]
        except _Abandoned:
            pass
        except BaseException as error:
            self._questions.put(error)
        else:
            self._questions.put(None)

    def _closure(self) -> torch.Tensor:
        self._questions.put(self.point())
        answer = self._answers.get()
        if answer is None:
            raise _Abandoned
        f, gradient = answer
        for parameter, part in zip(self._parameters, self._parts(gradient), strict=True):
            parameter.grad = part.clone() if parameter.requires_grad else None
        return f

    def _write(self, point: torch.Tensor) -> None:
        for parameter, part in zip(self._parameters, self._parts(point), strict=True):
            parameter.data.copy_(part)

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(vector, [parameter.numel() for parameter in self._parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]


def _together(
    opt: BatchOptimizer, points: torch.Tensor, kept: Sequence[int], choice: Any, steps: int
) -> dict[int, Result | None]:
    """See `_run`: the points of all runs that have not ended are evaluated at once."""
    walkers = {i: _Walker(opt.closure.parameters, points[i], choice, steps) for i in kept}
    answers: dict[int, Any] = dict.fromkeys(walkers)
    try:
        while answers:
            asked = {i: walkers[i].until_next(answer) for i, answer in answers.items()}
            rows = {i: point for i, point in asked.items() if point is not None}
            answers = {}
            if rows:
                f, gradients = opt.evaluate_many(torch.stack([*rows.values()]), gradients=True)
                answers = dict(zip(rows, zip(f, gradients, strict=True), strict=True))
    finally:
        for walker in walkers.values():
            walker.abandon()
    for i, walker in walkers.items():
        points[i] = walker.point()
    return {i: walker.result for i, walker in walkers.items()}
