"""SVRG against its formula, and on its own ground: mini-batches of different sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import batchopt

ROWS = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RIGHT = ROWS @ torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
BATCHES = [range(0, 16), range(16, 32), range(32, 48), range(48, 50)]


class Regression:
    """Least squares of four unknowns in two parameters, and a closure for some of the rows."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))]
        self.parameters += [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]

    @property
    def x(self) -> torch.Tensor:
        return torch.cat([parameter.detach() for parameter in self.parameters])

    def closure(self, rows: range) -> Callable[[], torch.Tensor]:
        def evaluate() -> torch.Tensor:
            for parameter in self.parameters:
                parameter.grad = None
            here = slice(rows.start, rows.stop)
            loss = (ROWS[here] @ torch.cat(list[torch.Tensor](self.parameters)) - RIGHT[here]).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return evaluate


def gradient(x: torch.Tensor, rows: range) -> torch.Tensor:
    matrix, right = ROWS[rows.start : rows.stop], RIGHT[rows.start : rows.stop]
    return 2 * matrix.T @ (matrix @ x - right) / len(rows)


def test_the_steps_are_those_of_the_formula() -> None:
    problem = Regression()
    optimizer = batchopt.SVRG(torch.optim.SGD(problem.parameters, lr=0.05), update_freq=3)
    x = problem.x
    at = x
    for number in range(4):
        taken = optimizer.begin_pass(problem.closure(range(50)))
        assert taken == (number % 3 == 0)
        at = x if taken else at
        for rows in BATCHES:
            expected = ((ROWS[rows.start : rows.stop] @ x - RIGHT[rows.start : rows.stop]).square().mean()).item()
            x = x - 0.05 * (gradient(x, rows) - gradient(at, rows) + gradient(at, range(50)))
            loss = optimizer.step(problem.closure(rows))
            assert float(loss) == pytest.approx(expected)
            torch.testing.assert_close(problem.x, x)


def test_it_converges_at_a_fixed_rate_where_sgd_does_not() -> None:
    inexact = RIGHT + torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    best = torch.linalg.lstsq(ROWS, inexact[:, None]).solution[:, 0]
    ends = []
    for reduced in (False, True):
        model = torch.nn.Linear(4, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)

        def make(params: list[torch.nn.Parameter], reduced: bool = reduced) -> torch.optim.Optimizer:
            base = torch.optim.SGD(params, lr=0.05)
            return batchopt.SVRG(base) if reduced else base

        loader = [(ROWS[rows.start : rows.stop], inexact[rows.start : rows.stop, None]) for rows in BATCHES]
        with batchopt.BatchOptimizer(model, torch.nn.MSELoss(), optimizer=make) as opt:
            for _ in range(60):
                if isinstance(opt.optimizer, batchopt.SVRG):
                    opt.optimizer.begin_pass(lambda: opt.full_gradient(loader))  # noqa: B023  # called at once
                for _ in opt.steps(loader):
                    pass
        ends.append((model.weight.detach()[0] - best).norm().item())
    assert ends[1] < 1e-6 < ends[0]
