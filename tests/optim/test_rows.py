"""Levenberg-Marquardt by rows of the Jacobian: where there are fewer residuals than parameters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, LevenbergMarquardt, Term, Weighted, extending
from batchopt.optim import squares
from batchopt.optim.quadratic import Rows, RowsModel
from tests.backends.least_squares_contract import X, Y, equation, flow, misfit
from tests.building import loaded
from tests.optim.kinds import NO_END
from tests.optim.test_levenberg_marquardt import Deadly

# 16 residuals of 23 parameters
DATA: dict[str, Any] = {
    "pde": X[20:28],
    "data": (Weighted(X[:4], torch.tensor([1.0, 0.0, 2.5, 0.3])), Y[:4]),
}
N, SIZE = 16, 23


def terms(**options: Any) -> dict[str, Term]:
    return {"pde": Term(residual=equation, weight=2.0), "data": Term(residual=misfit, weight=0.5, **options)}


def ends(module: nn.Module, dense: int, robust: bool = False, **options: Any) -> torch.Tensor:
    """The parameters after a few iterations."""
    bounds = options.pop("bounds", None)
    optimizer = LevenbergMarquardt(
        module.parameters(),
        dense=dense,
        bounds=[bounds] * len([*module.parameters()]) if bounds else None,
        **{"max_iter": 2, "scaling": "identity", **NO_END, **options},
    )
    loss = {"loss": "soft_l1", "scale": 0.1} if robust else {}
    with loaded(module, None, DATA, terms=terms(**loss), chunk_size=3) as opt:
        optimizer.step(extending.closure(opt))
        return opt.parameters.clone()


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[RowsModel]:
    """Those with rows that are made."""
    made: list[RowsModel] = []

    class Noted(RowsModel):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(squares, "RowsModel", Noted)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"robust": True},
        {"geodesic": True},
        {"step": "longest", "geodesic": True, "max_iter": 1},
        {"bounds": (-0.7, 1.35)},
    ],
    ids=["plain", "robust", "geodesic", "longest", "bounds"],
)
def test_steps_by_rows_are_those_of_the_matrix(options: dict[str, Any], models: list[RowsModel]) -> None:
    by_rows, by_matrix = (ends(flow(), dense, **options) for dense in (SIZE - 1, SIZE))
    assert len(models) == options.get("max_iter", 2)
    torch.testing.assert_close(by_rows, by_matrix, rtol=1e-10, atol=1e-10)


def test_a_step_over_residuals_alone_is_that_of_plain_torch(models: list[RowsModel]) -> None:
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def residuals(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(rows @ x) - 0.3

    x = nn.Parameter(torch.linspace(-0.4, 0.4, 9, dtype=torch.float64))
    before = x.detach().clone()
    r, jacobian = residuals(before), torch.func.jacrev(residuals)(before)
    damped = jacobian.T @ jacobian + 3.0 * jacobian.square().sum(0).max() * torch.eye(9).double()
    LevenbergMarquardt([x], damping=3.0, dense=8, max_iter=1).step(lambda: residuals(x))
    assert len(models) == 1
    torch.testing.assert_close(x.detach() - before, -torch.linalg.solve(damped, jacobian.T @ r), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("damping", [0.1, 1e-4, 1e-10])
def test_each_answer_of_the_model_is_that_of_the_matrix(damping: float) -> None:
    random = torch.Generator().manual_seed(0)
    rows, slopes, right = (torch.randn(*shape, generator=random).double() for shape in ((4, 7), (4,), (7,)))
    weights = torch.tensor([0.3, 2.0, 0.7, 1.0]).double()
    model = RowsModel(Rows(1.0, slopes, weights, rows.clone()), None)
    matrix = rows.T @ (weights[:, None] * rows)
    torch.testing.assert_close(model.times(right), matrix @ right)
    torch.testing.assert_close(model.decrease(right), -float(2 * right @ rows.T @ slopes + right @ matrix @ right))
    damped = matrix + damping * matrix.diagonal().max() * torch.eye(7).double()
    force = rows.T @ right[:4]
    torch.testing.assert_close(model.solve(force, damping), torch.linalg.solve(damped, force), rtol=1e-4, atol=1e-7)
    free = torch.tensor([1.0, 0, 1, 1, 0, 1, 1]).double()
    found = model.solve(right * free, damping, free)
    assert found is not None and not found[free == 0].any()
    torch.testing.assert_close((damped @ found)[free == 1], right[free == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "dense, held, expected", [(N, squares.HELD, 2), (N - 1, squares.HELD, 0), (N, 8 * N * SIZE - 1, 0)]
)
def test_rows_are_held_only_where_they_are_few(
    dense: int, held: int, expected: int, models: list[RowsModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(squares, "HELD", held)
    ends(flow(), dense)
    assert len(models) == expected


def test_a_longest_step_takes_no_more_eigenvalues_than_a_subspace_has(models: list[RowsModel]) -> None:
    for subspace in (N - 1, N):
        ends(flow(), SIZE - 1, step="longest", subspace=subspace)
    assert len(models) == 2


@pytest.mark.parametrize("step", ["first", "longest"])
def test_a_parameter_that_was_frozen_is_not_moved(step: Literal["first", "longest"], models: list[RowsModel]) -> None:
    module = flow()
    optimizer = LevenbergMarquardt(module.parameters(), step=step, dense=SIZE - 2, max_iter=2)
    with loaded(module, None, DATA, terms=terms(), chunk_size=5) as opt:
        module.speed.requires_grad_(False)
        before = opt.parameters.clone()
        optimizer.step(extending.closure(opt))
        assert models and torch.count_nonzero(opt.parameters - before) == SIZE - 1 and opt.parameters[0] == before[0]


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("number", [9, 2, 5, 14])
def test_bits_are_the_same_for_any_number_of_workers_and_after_a_kill(
    tmp_path: Path, number: int, models: list[RowsModel]
) -> None:
    def after(residual: Any, workers: int, **options: Any) -> str:
        lm = functools.partial(LevenbergMarquardt, geodesic=True, dense=SIZE - 1, max_iter=2, **options)
        one = {"data": Term(residual=residual)}
        with BatchOptimizer(flow(), terms=one, optimizer=lm, parallelize=workers, chunk_size=2) as opt:
            opt.step({"data": (X[:9], Y[:9])})
            return opt.fingerprint()

    for options in ({}, {"step": "longest"}):
        found = {after(misfit, workers, **options) for workers in (1, 2, 3)}
        assert len(found) == 1
    assert found == {after(Deadly(tmp_path, number), 2, step="longest")} and (tmp_path / "fired").exists()
    assert len(models) == 14
