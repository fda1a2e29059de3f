"""Runs from several starts: the same ends for any number of workers, and the lowest one kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import batchopt
from batchopt import extending

X = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]


class Wave(torch.nn.Module):
    """A sine, whose frequency has many local minima; and a frozen shift."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.frequency = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.shift = torch.nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.size * torch.sin(self.frequency * x + self.shift)


Y = 1.3 * torch.sin(3 * X)
STARTS = torch.tensor([[1.0, 0.5], [1.0, 2.5], [1.0, 3.4], [0.5, 6.0], [1.0, 9.0]], dtype=torch.float64)
CHOICES: dict[str, Any] = {
    "lbfgs": partial(batchopt.LBFGS, max_iter=15),
    "bounded": partial(batchopt.LBFGS, max_iter=15, bounds=[(0, 2), (0, 10)]),
    "torch": partial(torch.optim.LBFGS, max_iter=20, line_search_fn="strong_wolfe"),
    "lm": partial(batchopt.LevenbergMarquardt, max_iter=10),
    "adam": partial(torch.optim.Adam, lr=0.05),
}


def optimizer_of(workers: int, **options: Any) -> batchopt.BatchOptimizer:
    return batchopt.BatchOptimizer(Wave(), torch.nn.MSELoss(), parallelize=workers, chunk_size=10, **options)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("choice", CHOICES)
def test_ends_are_those_of_runs_one_by_one(choice: str) -> None:
    steps = 5 if choice == "adam" else 1
    ends, counted = [], []
    for start in STARTS:
        with optimizer_of(1, optimizer=CHOICES[choice]) as opt:
            opt.parameters.copy_(start)
            opt.load(X, Y)
            for _ in range(steps):
                assert opt.optimizer is not None
                opt.optimizer.step(extending.closure(opt))  # type: ignore[arg-type]
            ends.append((opt.evaluate().item(), *opt.parameters.tolist()))
            counted.append(None if choice in ("adam", "torch") else opt.result.evaluations)
    with optimizer_of(2, optimizer=CHOICES[choice]) as opt:
        opt.load(X, Y)
        found = opt.multistart(STARTS, steps=steps)
        assert [run.f for run in found.runs] == sorted(f for f, *_ in ends)
        for run, point in zip(found.runs, found.points, strict=True):
            assert (run.f, *point.tolist()) == ends[run.start]
            assert (run.result and run.result.evaluations) == counted[run.start]
        assert torch.equal(opt.parameters, found.points[0])
        assert opt.evaluate().item() == found.runs[0].f


def test_starts_that_are_not_kept_stay_where_they_are() -> None:
    with optimizer_of(2) as opt:
        opt.load(X, Y)
        before: Any = opt.evaluate_many(STARTS)
        before = before.tolist()
        found = opt.multistart(STARTS, keep=2)
        lowest = sorted(range(5), key=before.__getitem__)[:2]
        for run, point in zip(found.runs, found.points, strict=True):
            assert run.at_start == before[run.start]
            assert (run.result is None) == (run.minimum is None) == (run.start not in lowest)
            assert torch.equal(point, STARTS[run.start]) == (run.start not in lowest)


def test_equal_ends_are_one_minimum_and_the_table_shows_it() -> None:
    with optimizer_of(1) as opt:
        opt.load(X, Y)
        found = opt.multistart(STARTS)
    numbers = {run.start: run.minimum for run in found.runs}
    assert numbers[1] == numbers[2] == 0 and numbers[4]
    lines = str(found).splitlines()
    assert len(lines) == 6 and lines[1].split()[0] in "12" and "minima, the lowest" in repr(found)


def test_starts_without_a_value_are_left_out_and_a_run_that_ends_without_one_is_put_back() -> None:
    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.at - 1).sqrt() + 0 * x

    starts = torch.tensor([[0.5], [1.1], [3.0]], dtype=torch.float64)
    adam = partial(torch.optim.SGD, lr=10.0)
    with batchopt.BatchOptimizer(Root(), torch.nn.MSELoss(), parallelize=2, optimizer=adam) as opt:
        opt.load(X, Y * 0)
        found = opt.multistart(starts, steps=3)
        ends = {run.start: run for run in found.runs}
        assert ends[0].minimum is None and ends[0].f == float("inf") and ends[1].f == pytest.approx(0.1)
        assert found.points[0].tolist() == [1.1]
        assert opt.parameters.isfinite().all() and opt.output == pytest.approx(found.runs[0].f)
        with pytest.raises(ValueError, match="not finite at any of the starts"):
            opt.multistart(starts[:1])
        assert opt.parameters.tolist() == found.points[0].tolist()


@pytest.mark.slow
def test_runs_are_steps_that_count_and_hear_of_stop() -> None:
    heard: list[Any] = []
    with optimizer_of(2, optimizer=partial(batchopt.LBFGS, callback=heard.append), history=True) as opt:
        opt.load(X, Y)
        own = opt.optimizer
        opt.multistart(STARTS[:3])
        assert opt.optimizer is own and opt.batch_counter == 3 and len(opt.history) == len(heard)
        opt.stop()
        found = opt.multistart(STARTS)
        assert opt.stopped and not opt.paused
        opt.stop()
        opt.step(X, Y)
        with pytest.raises(ValueError, match="no row"):
            opt.multistart(STARTS[:0])
        assert opt.paused  # what was refused has not touched it
        assert [run.result is not None for run in sorted(found.runs)] == [True, False, False, False, False]


def test_what_a_run_raises_is_raised_with_x_as_before() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            if self.param_groups[0]["params"][1].item() > 5:
                raise ZeroDivisionError("on purpose")

    with optimizer_of(2, optimizer=partial(Failing, lr=0.1)) as opt:
        opt.load(X, Y)
        with pytest.raises(ZeroDivisionError):
            opt.multistart(STARTS)
        assert opt.parameters.tolist() == [1.0, 1.0]
        assert len(opt.multistart(STARTS[:2]).runs) == 2
