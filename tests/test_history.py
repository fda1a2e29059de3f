"""The course of a run, which is kept on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import LBFGS, BatchoptError, BatchOptimizer, Term
from batchopt.optim import Iteration

X = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
Y = X.sin()


def build(history: bool | int = True, optimizer: Any = "lbfgs", **options: Any) -> BatchOptimizer:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return BatchOptimizer(module, nn.MSELoss(), optimizer=optimizer, history=history, **options)


@pytest.mark.slow
@pytest.mark.parametrize("every", [True, 3])
def test_it_has_what_a_callback_is_told(every: Any) -> None:
    told: list[Iteration] = []
    with build(every, lambda p: LBFGS(p, max_iter=7, callback=told.append), parallelize=2) as opt:
        for _ in range(3):
            opt.step(X, Y)
        rows = [one for one in told if one.number % int(every) == 0]
        assert opt.history["f"] == [one.f for one in rows] and opt.history["step"][0] == 1
        assert opt.history["evaluations"] == [one.evaluations for one in rows]
        assert opt.history["gradient"] == [one.gradient for one in rows]
        assert opt.history["trials"] == [[list(trial) for trial in one.trials] for one in rows]
        assert all(min(f for _, f in one.trials) == one.f for one in rows)
        seconds = opt.history["seconds"]
        assert seconds == sorted(seconds) and opt.history["step"] == sorted(opt.history["step"])


def test_other_optimizers_have_a_row_for_each_step() -> None:
    with build(optimizer="adam") as opt:
        losses = [opt.step(X, Y) for _ in range(4)]
        assert opt.history["f"] == losses and opt.history["step"] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("l1", [0.0, 1e-3])
def test_it_has_the_losses_of_terms_at_the_accepted_points(l1: float) -> None:
    def squares(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (net(x) - y).square().mean()
        return loss

    terms = {"left": Term(squares), "right": Term(squares, weight=3.0)}
    module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    made = lambda p: LBFGS(p, max_iter=60, l1=l1)  # noqa: E731
    with BatchOptimizer(module, terms=terms, optimizer=made, history=True) as opt:
        opt.step({"left": (X[:50], Y[:50]), "right": (X[50:], 3 * Y[50:])})
        assert opt.result.evaluations > opt.result.iterations + 1  # some trials were rejected
        for row in opt.history.rows:
            penalty = row["f"] - row["terms"]["left"] - 3 * row["terms"]["right"]
            assert penalty > 0 if l1 else penalty == pytest.approx(0, abs=1e-12 * row["f"])
        if l1:
            assert penalty == pytest.approx(l1 * opt.parameters.abs().sum().item())


def test_a_checkpoint_has_it(tmp_path: Path) -> None:
    with build() as opt:
        opt.step(X, Y)
        opt.save(tmp_path / "file")
        rows = opt.history.rows
    with build() as opt:
        opt.load_checkpoint(tmp_path / "file")
        assert opt.history.rows == rows
        opt.step(X, Y)
        assert opt.history.rows[: len(rows)] == rows and len(opt.history) > len(rows)
        state = {**opt.state_dict(), "course": {"rows": 3}}
        with pytest.raises(TypeError, match="not iterable"):
            opt.load_state_dict(state)
    with build(False) as opt:
        opt.load_checkpoint(tmp_path / "file")
        with pytest.raises(BatchoptError, match="history=True"):
            opt.history  # noqa: B018
