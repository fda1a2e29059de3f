"""The course of a run, which is kept on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import CG, LBFGS, BatchoptError, BatchOptimizer, LevenbergMarquardt, SSBroyden, Term
from batchopt.optim import Iteration
from batchopt.training import log_steps

X = torch.linspace(-2, 2, 100, dtype=torch.float64)[:, None]
Y = X.sin()


def build(history: Any = True, optimizer: Any = "lbfgs", **options: Any) -> BatchOptimizer:
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


KEPT = {"first": lambda m: m[0].weight[0], "ends": lambda m: m[2].weight[0, :2], "norm": lambda m: m[2].weight.norm()}


@pytest.mark.parametrize("kind", [LBFGS, LevenbergMarquardt, SSBroyden, CG])
def test_numbers_of_the_user_are_those_of_the_accepted_points(kind: Any) -> None:
    told: list[list[Any]] = []

    def note(_: Iteration) -> None:
        told.append([opt.module[0].weight[0].item(), opt.module[2].weight[0, :2].tolist()])  # type: ignore[index]

    with build(KEPT, lambda p: kind(p, max_iter=6, callback=note), parallelize=2) as opt:
        for _ in range(2):
            opt.step(X, Y)
        rows = opt.history.rows
    assert [[row["first"], row["ends"]] for row in rows] == told and len(rows) > 6
    with build(KEPT, lambda p: kind(p, max_iter=6)) as opt:  # nothing else asks for X at these points
        for _ in range(2):
            opt.step(X, Y)
        torch.testing.assert_close(torch.tensor(opt.history["ends"]), torch.tensor([row["ends"] for row in rows]))
        best = min(opt.history.rows, key=lambda row: row["f"])
        assert best["norm"] == opt.module[2].weight.norm().item()  # type: ignore[index]


def test_other_optimizers_have_the_numbers_after_a_step(tmp_path: Path) -> None:
    lines: list[Any] = []
    write = lambda numbers, iteration: lines.append(numbers)  # noqa: E731
    with build(KEPT, "adam") as opt, log_steps(opt, write, numbers=KEPT):
        for _ in range(3):
            opt.step(X, Y)
            first, ends = opt.module[0].weight[0].item(), opt.module[2].weight[0, :2].tolist()  # type: ignore[index]
            row = opt.history.rows[-1]
            assert [row["first"], row["ends"]] == [first, ends]
            assert [lines[-1][name] for name in ("first", "ends/0", "ends/1")] == [first, *ends]
        opt.save(tmp_path / "file")
        rows = opt.history.rows
    with build(KEPT, "adam") as opt:
        opt.load_checkpoint(tmp_path / "file")
        assert opt.history.rows == rows


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="`history` has 'f', which rows have of their own"):
        build({"f": lambda m: 1.0})
    with pytest.raises(TypeError, match=r"history\['a'\]` must be callable as history\['a'\]\(module\)"):
        build({"a": 3.0})
    with pytest.raises(TypeError, match="`numbers` must be a dict of names"), build() as opt:
        log_steps(opt, numbers=[1]).__enter__()  # type: ignore[arg-type]
    for function, error in ((lambda m: m[0].weight @ m[2].weight, ValueError), (lambda m: "a", TypeError)):
        with build({"a": function}) as opt:
            before = opt.parameters.clone()
            with pytest.raises(error, match="the function 'a' must return a real number, or a tensor"):
                opt.step(X, Y)
            assert torch.equal(opt.parameters, before)


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
