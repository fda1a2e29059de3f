"""What all optimizers with a line search promise, each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import batchopt
from batchopt.optim.descent import Descent
from batchopt.optim.minimizer import Iteration, Result, Status
from tests.optim import reference

Make = Callable[..., Descent]
KINDS: dict[str, Make] = {
    "lbfgs": batchopt.LBFGS,
    "lbfgs armijo": lambda params, **options: batchopt.LBFGS(params, line_search_fn="armijo", **options),
    "cg": batchopt.CG,
    "cg fletcher-reeves": lambda params, **options: batchopt.CG(params, beta="fletcher-reeves", **options),
    "cg polak-ribiere": lambda params, **options: batchopt.CG(params, beta="polak-ribiere", **options),
    "cg hestenes-stiefel": lambda params, **options: batchopt.CG(params, beta="hestenes-stiefel", **options),
    "ssbroyden": batchopt.SSBroyden,
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
EXACT = {"tolerance_grad": 1e-9, "tolerance_change": 0.0, "max_iter": 5000}


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def logistic(x: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(60, len(x), generator=random, dtype=torch.float64).to(x)
    return torch.nn.functional.softplus(-rows @ x).mean() + 0.01 * (x @ x)


class Problem:
    """A function of parameters of three shapes, and an optimizer over them."""

    def __init__(self, make: Make, function: reference.Function, start: torch.Tensor, **options: Any) -> None:
        self.function = function
        parts = torch.split(start.clone(), [1, len(start) - 3, 2])
        self.parameters = [torch.nn.Parameter(part.clone()) for part in parts]
        self.optimizer = make(self.parameters, **options)
        self.values: list[float] = []

    @property
    def x(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        f = self.function(torch.cat([parameter.reshape(-1) for parameter in self.parameters]))
        f.backward()  # type: ignore[no-untyped-call]
        self.values.append(f.item())
        return f

    def step(self) -> Result:
        first = torch.as_tensor(self.optimizer.step(self.closure)).detach()
        torch.testing.assert_close(first.item(), self.values[-self.result.evaluations], rtol=0, atol=0, equal_nan=True)
        return self.result

    @property
    def result(self) -> Result:
        assert self.optimizer.result is not None
        return self.optimizer.result


def start(n: int = 6, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1.2, 1.0, n, dtype=torch.float64).to(dtype)


@every_kind
@pytest.mark.parametrize("function", [rosenbrock, logistic])
def test_the_minimum_is_that_of_a_slow_one(make: Make, function: reference.Function) -> None:
    problem = Problem(make, function, start(), **EXACT)
    result = problem.step()
    assert result.status is Status.GRADIENT
    expected = reference.lbfgs(function, start(), 2000)
    f, _ = reference.value_and_gradient(function, expected)
    if function is logistic:  # the other one has two minima
        torch.testing.assert_close(problem.x, expected, rtol=1e-6, atol=1e-7)
    assert result.f <= f + 1e-12 or result.f < 4.0
    assert result.f == function(problem.x).item()


@every_kind
def test_result_says_what_was_done(make: Make) -> None:
    problem = Problem(make, rosenbrock, start(), max_iter=7, tolerance_change=0.0)
    seen: list[Iteration] = []

    def look(iteration: Iteration) -> None:
        assert rosenbrock(problem.x).item() == iteration.f
        seen.append(iteration)

    problem.optimizer.callback = look
    result = problem.step()
    f, gradient = reference.value_and_gradient(rosenbrock, problem.x)
    assert result.status is Status.ITERATIONS
    assert (result.iterations, result.evaluations) == (7, len(problem.values))
    assert (result.f, result.gradient) == (f, gradient.abs().max().item())
    assert result.f == min(problem.values)
    assert [one.number for one in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert seen[-1].f == f and seen[-1].evaluations == result.evaluations and seen[-1].change == result.change
    problem.step()
    assert seen[7].number == 8 and seen[-1].evaluations == len(problem.values)


@every_kind
def test_no_limits_and_no_tolerances_mean_that_it_runs_until_nothing_lower_is_found(make: Make) -> None:
    problem = Problem(make, logistic, start(), max_iter=None, tolerance_grad=0.0, tolerance_change=0.0)
    result = problem.step()
    assert result.status in (Status.NO_DECREASE, Status.GRADIENT)
    assert result.gradient < 1e-7
    assert result.f <= min(problem.values) * (1 + 1e-15)


@every_kind
def test_what_ends_a_step(make: Make) -> None:
    for limit in (1, 2, 3, 5, 9):
        problem = Problem(make, rosenbrock, start(), max_eval=limit, max_iter=None)
        result = problem.step()
        assert result.status is Status.EVALUATIONS and result.evaluations == limit == len(problem.values)
        assert rosenbrock(problem.x).item() == min(problem.values)
    problem = Problem(make, logistic, start(), max_iter=None, tolerance_grad=0.0, tolerance_change=1e-3)
    assert problem.step().status is Status.CHANGE
    problem = Problem(make, logistic, start(), callback=lambda iteration: iteration.number == 2)
    result = problem.step()
    assert (result.status, result.iterations) == (Status.CALLBACK, 2)
    problem = Problem(make, lambda x: (x * x).sum(), 0 * start(), tolerance_grad=0.0)  # a minimum is seen at once
    result = problem.step()
    assert (result.status, result.iterations, result.evaluations) == (Status.GRADIENT, 0, 1)
    assert torch.equal(problem.x, 0 * start())
    problem = Problem(make, lambda x: (x - 1).log().sum(), start())
    assert problem.step().status is Status.NOT_FINITE
    assert torch.equal(problem.x, start())


def wall(bad: float) -> reference.Function:
    """logistic, with a wall of NaN or infinity at a distance from the start."""

    def function(x: torch.Tensor) -> torch.Tensor:
        far = (x - start(len(x))).norm() > 0.5
        return logistic(x) + (bad * (x * x).sum() if far else 0.0)

    return function


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("refused", [False, True])
def test_a_trial_that_is_not_finite_or_is_refused_shortens_the_step(make: Make, bad: float, refused: bool) -> None:
    problem = Problem(make, wall(bad), start(), max_iter=30, lr=50.0)
    plain = problem.closure

    def closure() -> torch.Tensor:
        f = plain()
        if refused and not f.isfinite():
            raise batchopt.NonFiniteError("loss is nan", 0, range(1), 1, 1)
        return f

    problem.closure = closure  # type: ignore[method-assign]
    result = problem.step()
    assert result.not_finite == sum(not math.isfinite(value) for value in problem.values) > 0
    assert math.isfinite(result.f) and problem.x.isfinite().all()
    assert result.f < problem.values[0]
    assert (problem.x - start()).norm() <= 0.5


@every_kind
def test_a_gradient_that_is_not_that_of_f_is_said(make: Make) -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        f = logistic(x)
        return 2 * f.detach() - f

    problem = Problem(make, turned, start(), max_iter=None)
    result = problem.step()
    assert result.status is Status.NO_DECREASE
    assert result.f <= problem.values[0]
    assert "the gradient is not that of f" in result.status.value


@every_kind
def test_what_the_closure_raises_is_raised_at_the_best_point(make: Make) -> None:
    problem = Problem(make, rosenbrock, start(), max_iter=None)

    def closure() -> torch.Tensor:
        if len(problem.values) == 12:
            raise KeyboardInterrupt
        return problem.closure()

    with pytest.raises(KeyboardInterrupt):
        problem.optimizer.step(closure)
    assert rosenbrock(problem.x).item() == min(problem.values)


@every_kind
def test_steps_go_on_where_the_last_one_ended(make: Make) -> None:
    one = Problem(make, rosenbrock, start(), max_iter=24, tolerance_change=0.0)
    whole = one.step()
    other = Problem(make, rosenbrock, start(), max_iter=8, tolerance_change=0.0)
    results = [other.step() for _ in range(3)]
    torch.testing.assert_close(other.x, one.x, rtol=1e-6, atol=1e-6)
    assert all(not result.forgotten for result in results)
    assert sum(result.evaluations for result in results) == whole.evaluations + 2


@every_kind
def test_a_function_that_changes_between_steps_is_told(make: Make) -> None:
    problem = Problem(make, rosenbrock, start(), max_iter=8)
    problem.step()
    assert problem.result.forgotten == ()
    problem.function = logistic
    problem.step()
    assert next(iter(problem.result.forgotten)) == "the function changed between two steps"
    assert problem.result.f < problem.values[-problem.result.evaluations]


@every_kind
def test_a_scheduler_may_set_the_first_step(make: Make) -> None:
    problem = Problem(make, rosenbrock, start(), max_iter=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(problem.optimizer, 0.5)
    problem.step()
    scheduler.step()
    assert problem.optimizer.param_groups[0]["lr"] == 0.5


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(make: Make, dtype: torch.dtype) -> None:
    problem = Problem(make, logistic, start(dtype=dtype), max_iter=50)
    result = problem.step()
    assert result.f < problem.values[0]
    assert problem.x.dtype == dtype and problem.x.isfinite().all()
    if dtype == torch.float32:
        expected = reference.lbfgs(logistic, start(), 500)
        torch.testing.assert_close(problem.x.double(), expected, rtol=1e-2, atol=2e-3)


@every_kind
def test_parameters_without_gradient_stay_and_complex_ones_move(make: Make) -> None:
    unused = torch.nn.Parameter(torch.ones(2, dtype=torch.complex128))
    used = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    used.data = used.data.to(torch.complex128)
    optimizer = make([unused, used], max_iter=50)

    def closure() -> torch.Tensor:
        used.grad = None
        f = (used - (2 - 1j)).abs().square().sum()
        f.backward()  # type: ignore[no-untyped-call]
        return f

    optimizer.step(closure)
    torch.testing.assert_close(used.detach(), torch.full((2,), 2 - 1j, dtype=torch.complex128))
    assert torch.equal(unused.detach(), torch.ones(2, dtype=torch.complex128))


@every_kind
@pytest.mark.parametrize("scale", [1e-150, 1e-170, 1e150])
def test_numbers_as_small_and_as_large_as_they_get(make: Make, scale: float) -> None:
    problem = Problem(make, lambda x: scale * (x * x).sum(), start(), max_iter=40, tolerance_grad=0.0)
    result = problem.step()
    assert math.isfinite(result.f) and problem.x.isfinite().all()
    assert result.f <= problem.values[0]
