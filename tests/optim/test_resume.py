"""A run that goes on from a saved state has the bits of one that was never interrupted, wherever that was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_other_parameters_is_refused(kind: str) -> None:
    problem, fitted = Problem(KINDS[kind], rosenbrock, start()), Plain(decay, torch.tensor([30.0, 8.0, 0.5]))
    problem.step(), fitted.step()
    with pytest.raises(ValueError, match="the state is of 6 parameters; here are 7"):
        Problem(KINDS[kind], rosenbrock, start(7)).optimizer.load_state_dict(saved(problem.optimizer))
    with pytest.raises(ValueError, match="the state is of 3 parameters; here are 2"):
        Plain(lambda x: x, torch.ones(2)).optimizer.load_state_dict(saved(fitted.optimizer))


def test_a_state_that_is_looked_at_within_a_step_changes_nothing() -> None:
    found = []
    for looks in (False, True):
        problem = Problem(batchopt.LBFGS, rosenbrock, start(20), history_size=5, max_iter=30, tolerance_change=0.0)
        if looks:
            problem.optimizer.callback = lambda _, problem=problem: saved(problem.optimizer) and None
        problem.step()
        found.append(problem.x)
    assert torch.equal(*found)


# Without those for sparse gradients, and those that take only matrices.
TORCHS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if name not in ("SparseAdam", "Muon")
)


OVER_WORKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (getattr(torch.optim, name), {"lr": 0.01}) for name in TORCHS},
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 5}),
    "our LBFGS": (batchopt.LBFGS, {**OPTIONS, "history_size": 3}),
    **{kind.__name__: (kind, OPTIONS) for kind in (batchopt.CG, batchopt.SSBroyden, batchopt.LevenbergMarquardt)},
}


@pytest.mark.parametrize("name", OVER_WORKERS)
def test_resumes_to_the_bit_with_another_number_of_workers(name: str) -> None:
    kind, options = OVER_WORKERS[name]
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-1, 1, 20, dtype=dtype).unsqueeze(1)

        def made(workers: int, dtype: torch.dtype = dtype) -> batchopt.BatchOptimizer:
            torch.manual_seed(0)
            given: dict[str, Any] = {"parallelize": workers, "chunk_size": 5}
            return batchopt.BatchOptimizer(
                Mlp(1, 6, 1).to(dtype), nn.MSELoss(), optimizer=lambda params: kind(params, **options), **given
            )

        with made(1) as whole, made(2) as part:
            for _ in range(3):
                part.load_state_dict(whole.state_dict())
                for _ in range(2):
                    assert part.step(x, x.sin()) == whole.step(x, x.sin())
                assert torch.equal(part.parameters, whole.parameters)


# ---- optimizers are copied and pickled as torch's are


X, Y = torch.linspace(-1, 1, 12).view(6, 2).double(), torch.linspace(0, 1, 6).view(6, 1).double()
COPIED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda params: batchopt.LBFGS(params, max_iter=2),
    "LBFGS, l1": lambda params: batchopt.LBFGS(params, max_iter=2, l1=1e-3),
    "CG": lambda params: batchopt.CG(params, max_iter=2),
    "SSBroyden": lambda params: batchopt.SSBroyden(params, max_iter=2),
    "SVRG": lambda params: batchopt.SVRG(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
}


def step(module: nn.Module, optimizer: Any) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(torch.tanh(module(X)), Y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if isinstance(optimizer, batchopt.SVRG):
        optimizer.begin_pass(lambda: closure())
    loss: torch.Tensor = optimizer.step(closure)
    return loss.detach().item()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_goes_on_by_itself(kind: str, duplicate: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(2, 1).double()
    optimizer = COPIED[kind](list(module.parameters()))
    step(module, optimizer)
    other, its_own = duplicate((module, optimizer))
    assert type(its_own) is type(optimizer)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    found = [step(other, its_own) for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    assert found == [step(module, optimizer) for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(other.parameters(), module.parameters(), strict=True))


def test_what_a_copy_remembers_is_all_there_is() -> None:
    module = nn.Linear(2, 1).double()
    optimizer = batchopt.LBFGS(module.parameters(), callback=print)
    assert copy.deepcopy(optimizer).result is None
    optimizer.callback = None
    step(module, optimizer)
    assert copy.deepcopy(optimizer).result == optimizer.result
    optimizer.callback = print
    assert copy.deepcopy(optimizer).callback is print
