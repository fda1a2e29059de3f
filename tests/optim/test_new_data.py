"""Curvature that survives new points, and curvature that must not."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import batchopt
from batchopt.optim.descent import Descent
from batchopt.optim.minimizer import Result
from tests.optim import reference

Kind = Callable[..., Descent]
every_kind = pytest.mark.parametrize("kind", [batchopt.LBFGS, batchopt.SSBroyden])
TO_THE_END = {"max_iter": 5000, "tolerance_grad": 1e-6, "tolerance_change": 0.0}
NO_END = {"tolerance_grad": 0.0, "tolerance_change": 0.0}


# ---- other functions


def quadratic(eigenvalues: torch.Tensor, seed: int = 0) -> reference.Function:
    """With a minimum of 0 somewhere, and the eigenvectors of no seed but 0."""
    random = torch.Generator().manual_seed(0)
    vectors, _ = torch.linalg.qr(torch.randn(40, 40, generator=random, dtype=torch.float64))
    random.manual_seed(seed + 1)
    place = torch.randn(40, generator=random, dtype=torch.float64)
    matrix = vectors @ torch.diag(eigenvalues) @ vectors.T
    return lambda x: (x - place) @ matrix @ (x - place) / 2


EIGENVALUES = torch.logspace(0, 4, 40, dtype=torch.float64)
OTHERS = {
    "a million times as large": quadratic(1e6 * EIGENVALUES, seed=1),
    "a millionth": quadratic(1e-6 * EIGENVALUES, seed=1),
    "flat where it was steep": quadratic(EIGENVALUES.flip(0), seed=1),
}


class Changing:
    """An optimizer over a vector, whose function may change."""

    def __init__(self, kind: Kind, function: reference.Function, **options: Any) -> None:
        self.x = torch.zeros(40, dtype=torch.float64, requires_grad=True)
        self.optimizer = kind([self.x], **{**NO_END, "max_iter": 60, **options})
        self.function = function
        self.step()

    def step(self, **options: Any) -> Result:
        self.optimizer.param_groups[0].update(options)
        self.optimizer.step(self.closure)
        assert self.optimizer.result is not None
        return self.optimizer.result

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        f = self.function(self.x)
        f.backward()  # type: ignore[no-untyped-call]
        return f


@pytest.mark.rows
@every_kind
@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_another_function_is_not_taken_for_new_points(kind: Kind, function: reference.Function) -> None:
    evaluations = {}
    for when in ("forget", "keep"):
        run = Changing(kind, quadratic(EIGENVALUES), when_data_change=when)
        run.function = function
        result = run.step(**TO_THE_END)
        assert result.gradient <= 1e-6 and not result.kept
        (why,) = result.forgotten
        assert ("times the curvature that was known" in why) == (when == "keep"), why
        evaluations[when] = result.evaluations
    assert evaluations["keep"] <= 1.25 * evaluations["forget"] + 5  # a search is all that the trial costs


@every_kind
def test_the_same_matrix_with_another_minimum_is_kept(kind: Kind) -> None:
    evaluations = {}
    for when in ("forget", "keep"):
        run = Changing(kind, quadratic(EIGENVALUES), when_data_change=when)
        run.function = quadratic(EIGENVALUES, seed=1)
        result = run.step(**TO_THE_END)
        assert result.kept == (when == "keep") and result.gradient <= 1e-6
        evaluations[when] = result.evaluations
    assert evaluations["keep"] < 0.9 * evaluations["forget"]


@every_kind
def test_curvature_of_the_other_sign_is_forgotten(kind: Kind) -> None:
    run = Changing(kind, quadratic(EIGENVALUES), when_data_change="keep", line_search_fn="armijo")
    here = run.x.detach().clone()
    run.function = lambda x: -(x - here).square().sum() / 2 + 1e-3 * (x - here).sum() + (x - here).pow(4).sum()
    result = run.step(max_iter=1)
    assert not result.kept and "has -" in result.forgotten[0]


# ---- all else


@every_kind
def test_the_trial_goes_on_after_a_checkpoint(kind: Kind) -> None:
    run = Changing(kind, quadratic(EIGENVALUES), when_data_change="keep")
    run.function = OTHERS["flat where it was steep"]
    result = run.step(max_eval=1)  # which only sees that the function is another one
    assert result.iterations == 0 and not result.kept and not result.forgotten
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    again = Changing(kind, quadratic(EIGENVALUES, seed=5))
    again.function = run.function
    with torch.no_grad():
        again.x.copy_(run.x)
    again.optimizer.load_state_dict(torch.load(file, weights_only=True))
    first, second = run.step(max_eval=None, max_iter=9), again.step(max_eval=None, max_iter=9)
    assert "times the curvature" in first.forgotten[0] and first == second and torch.equal(run.x, again.x)


def test_after_a_step_that_was_undone_nothing_is_left_to_be_judged() -> None:
    run = Changing(batchopt.LBFGS, quadratic(EIGENVALUES), when_data_change="keep")
    run.function = quadratic(EIGENVALUES / 1000, seed=1)  # along its gradient the curvature is about 1
    run.step(max_eval=1)  # which only sees that the function is another one
    state = run.optimizer.state_dict()
    assert state["state"][0]["on_trial"] and state["state"][0].pop("curvature")  # which an undone step drops
    run.optimizer.load_state_dict(state)
    result = run.step(max_eval=None)
    assert not result.kept and not result.forgotten
