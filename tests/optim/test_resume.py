"""A run that goes on from a saved state has the bits of one that was never interrupted, wherever that was."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import batchopt
from batchopt.optim.minimizer import Minimizer
from tests.optim.test_descent import KINDS, Problem, rosenbrock, start
from tests.optim.test_levenberg_marquardt import Plain, decay
from tests.workloads import Mlp

ITERATIONS = 130
OPTIONS: dict[str, Any] = {"max_iter": 1, "tolerance_grad": 0.0, "tolerance_change": 0.0}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def saved(optimizer: Minimizer) -> dict[str, Any]:
    """Its state, as it comes out of a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@both_dtypes
def test_at_every_iteration(kind: str, dtype: torch.dtype) -> None:
    whole = Problem(KINDS[kind], rosenbrock, start(150, dtype), **OPTIONS)
    for _ in range(ITERATIONS):
        part = Problem(KINDS[kind], rosenbrock, whole.x, **OPTIONS)
        part.optimizer.load_state_dict(saved(whole.optimizer))
        assert part.step() == whole.step()
        assert torch.equal(part.x, whole.x)
    if kind == "lbfgs":
        assert len(whole.optimizer.state_dict()["state"][0]["curvature"]["pairs"]) == 100


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"geodesic": True}, {"dense": 0}], ids=["dense", "geodesic", "products"])
@pytest.mark.parametrize("scaling", ["diagonal", "identity"])
@both_dtypes
def test_at_every_iteration_of_levenberg_marquardt(scaling: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    first = torch.tensor([30.0, 8.0, 0.5], dtype=dtype)
    whole = Plain(decay, first, scaling=scaling, **options, **OPTIONS)
    for _ in range(10 if options else ITERATIONS):
        part = Plain(decay, whole.x, scaling=scaling, **options, **OPTIONS)
        part.optimizer.load_state_dict(saved(whole.optimizer))
        result = whole.step()
        assert part.step() == result
        assert torch.equal(part.x, whole.x)
        if not result.iterations:
            break  # there is nothing lower


def test_a_state_that_is_looked_at_within_a_step_changes_nothing() -> None:
    found = []
    for looks in (False, True):
        problem = Problem(batchopt.LBFGS, rosenbrock, start(20), history_size=5, max_iter=30, tolerance_change=0.0)
        if looks:
            problem.optimizer.callback = lambda _, problem=problem: saved(problem.optimizer) and None
        problem.step()
        found.append(problem.x)
    assert torch.equal(*found)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make", [batchopt.LBFGS, batchopt.CG, batchopt.SSBroyden, batchopt.LevenbergMarquardt, torch.optim.Adam]
)
@both_dtypes
def test_with_another_number_of_workers(make: Any, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 20, dtype=dtype).unsqueeze(1)
    options = {
        **({} if make is torch.optim.Adam else OPTIONS),
        **({"history_size": 3} if make is batchopt.LBFGS else {}),
    }

    def over(workers: int) -> batchopt.BatchOptimizer:
        torch.manual_seed(0)
        return batchopt.BatchOptimizer(
            Mlp(1, 6, 1).to(dtype),
            nn.MSELoss(),
            optimizer=lambda params: make(params, **options),
            parallelize=workers,
            chunk_size=5,
            threads_per_worker=1,
        )

    with over(1) as whole, over(2) as part:
        for _ in range(8):
            part.load_state_dict(whole.state_dict())
            assert part.step(x, x.sin()) == whole.step(x, x.sin())
            assert torch.equal(part.parameters, whole.parameters)
