"""What all optimizers of ours promise, each of them."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch

import batchopt
from batchopt.optim.minimizer import Iteration, Minimizer, Status
from tests.optim import reference
from tests.optim.kinds import (
    FEW,
    KINDS,
    NO_END,
    SEARCHES,
    Function,
    Make,
    Problem,
    logistic,
    logits,
    rosenbrock,
    start,
    valley,
    value,
)

slow = [pytest.mark.slow]
every_kind = pytest.mark.parametrize("make", FEW.values(), ids=FEW)
EXACT = {"tolerance_grad": 1e-9, "tolerance_change": 0.0, "max_iter": 5000}


@every_kind
@pytest.mark.parametrize("function", [pytest.param(valley, marks=slow), logits])
def test_the_minimum_is_that_of_a_slow_one(make: Make, function: Function) -> None:
    problem, f = Problem(make, function, start(), **EXACT), value(function)
    result = problem.step()
    assert result.status is Status.GRADIENT
    expected = reference.lbfgs(f, start(), 2000)
    if function is logits:  # the other one has two minima
        torch.testing.assert_close(problem.x, expected, rtol=1e-6, atol=1e-7)
    assert result.f <= f(expected).item() + 1e-12 or result.f < 4.0
    assert result.f == f(problem.x).item()


@every_kind
def test_result_says_what_was_done(make: Make) -> None:
    problem = Problem(make, valley, start(), max_iter=7, **NO_END)
    seen: list[Iteration] = []

    def look(iteration: Iteration) -> None:
        assert rosenbrock(problem.x).item() == iteration.f
        seen.append(iteration)

    problem.optimizer.callback = look
    result = problem.step()
    f, gradient = reference.value_and_gradient(rosenbrock, problem.x)
    assert result.status is Status.ITERATIONS
    assert (result.iterations, result.evaluations) == (7, len(problem.values))
    assert result.f == f and result.gradient == pytest.approx(gradient.abs().max().item(), rel=1e-12)
    assert result.f == min(problem.values)
    assert [one.number for one in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert seen[-1].f == f and seen[-1].evaluations == result.evaluations and seen[-1].change == result.change
    problem.step()
    assert seen[7].number == 8 and seen[-1].evaluations == len(problem.values)


@every_kind
def test_what_ends_a_step(make: Make) -> None:
    for limit in (1, 2, 3, 5, 9):
        problem = Problem(make, valley, start(), max_eval=limit, max_iter=None)
        result = problem.step()
        assert result.status is Status.EVALUATIONS and result.evaluations == limit == len(problem.values)
        assert rosenbrock(problem.x).item() == min(problem.values)
    problem = Problem(make, logits, start(), max_iter=None, tolerance_grad=0.0, tolerance_change=1e-3)
    assert problem.step().status is Status.CHANGE
    problem = Problem(make, logits, start(), callback=lambda iteration: iteration.number == 2)
    result = problem.step()
    assert (result.status, result.iterations) == (Status.CALLBACK, 2)
    problem = Problem(make, lambda x: x, 0 * start(), tolerance_grad=0.0)  # a minimum is seen at once
    result = problem.step()
    assert (result.status, result.iterations, result.evaluations) == (Status.GRADIENT, 0, 1)
    assert torch.equal(problem.x, 0 * start())
    problem = Problem(make, lambda x: (x - 1).log(), start())
    assert problem.step().status is Status.NOT_FINITE
    assert torch.equal(problem.x, start())


@pytest.mark.rows
@every_kind
@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=slow)])
@pytest.mark.parametrize("refused", [False, True])
def test_a_trial_that_is_not_finite_or_is_refused_shortens_the_step(make: Make, bad: float, refused: bool) -> None:
    def walled(x: torch.Tensor) -> torch.Tensor:
        is_far = (x - start()).norm() > 0.1
        if is_far and refused:
            raise batchopt.NonFiniteError("loss is nan", 0, range(1), 1, 1)
        return logits(x) + (bad * x.sum() if is_far else 0.0)

    problem = Problem(make, walled, start(), max_iter=30)
    problem.optimizer.param_groups[0].update({"damping": 1e-9} if make not in SEARCHES.values() else {"lr": 50.0})
    result = problem.step()
    assert result.not_finite == sum(not math.isfinite(value) for value in problem.values) > 0
    assert math.isfinite(result.f) and problem.x.isfinite().all()
    assert result.f < problem.values[0]
    assert (problem.x - start()).norm() <= 0.1


@pytest.mark.parametrize("make", SEARCHES.values(), ids=SEARCHES)
def test_a_gradient_that_is_not_that_of_f_is_said(make: Make) -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        f = logistic(x)
        return 2 * f.detach() - f

    problem = Problem(make, turned, start(), max_iter=None, **NO_END)
    result = problem.step()
    assert result.status is Status.NO_DECREASE
    assert result.f <= problem.values[0]
    assert "the gradient is not that of f" in result.status.value


@every_kind
def test_what_the_closure_raises_is_raised_at_the_best_point(make: Make) -> None:
    problem = Problem(make, valley, start(), max_iter=None)

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if len(problem.values) == 12:
            raise KeyboardInterrupt
        return valley(x)

    problem.function = interrupted
    with pytest.raises(KeyboardInterrupt):
        problem.step()
    assert rosenbrock(problem.x).item() == min(problem.values)


@every_kind
def test_a_function_that_changes_between_steps_is_told(make: Make) -> None:
    problem = Problem(make, valley, start(), max_iter=8)
    problem.step()
    assert problem.result.forgotten == ()
    problem.function = logits
    problem.step()
    assert next(iter(problem.result.forgotten)) == "the function changed between two steps"
    assert problem.result.f < problem.values[-problem.result.evaluations]


@every_kind
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=slow), torch.bfloat16])
def test_lower_precision(make: Make, dtype: torch.dtype) -> None:
    problem = Problem(make, logits, start(dtype=dtype), max_iter=50)
    result = problem.step()
    assert result.f < problem.values[0]
    assert problem.x.dtype == dtype and problem.x.isfinite().all()
    if dtype == torch.float32:
        expected = reference.lbfgs(logistic, start(), 500)
        torch.testing.assert_close(problem.x.double(), expected, rtol=1e-2, atol=2e-3)


@every_kind
def test_complex_parameters_move_as_pairs_of_real_ones_and_what_f_does_not_depend_on_stays(make: Make) -> None:
    """A real one of odd size lies before them, and their gradients are lazily conjugate."""

    def fitted(pairs: bool) -> torch.Tensor:
        rate, numbers = torch.nn.Parameter(start(1)), torch.view_as_complex(start(12).view(6, 2).clone())
        unused = torch.nn.Parameter(torch.ones(2, dtype=torch.complex128))
        weight = torch.nn.Parameter(torch.view_as_real(numbers) if pairs else numbers)
        optimizer = make([rate, unused, weight], max_iter=5)

        def residuals() -> torch.Tensor:
            found = torch.view_as_complex(weight) if pairs else weight
            turned = found.conj() * (1 + 2j)
            return torch.cat([turned.real * rate - 1, (turned * found[0]).imag, found.abs() - 0.5])

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            f = residuals().square().sum()
            f.backward()  # type: ignore[no-untyped-call]
            return f

        before = residuals().square().sum()
        optimizer.step(loss if make in SEARCHES.values() else residuals)
        assert residuals().square().sum() < before / 2 and torch.equal(unused, torch.ones_like(unused))
        return torch.cat([rate, (weight if pairs else torch.view_as_real(weight)).flatten()])

    torch.testing.assert_close(fitted(False), fitted(True), rtol=1e-7, atol=1e-9)


# ---- its state


def saved(optimizer: Minimizer) -> dict[str, Any]:
    """As it comes out of a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs in a box", "lm"])
def test_at_every_iteration_one_goes_on_from_a_saved_state_with_the_same_bits(kind: str) -> None:
    """Also where the history is full."""
    whole = Problem(KINDS[kind], valley, start(150 if kind in SEARCHES else 5), max_iter=1, **NO_END)
    for _ in range(130 if kind in SEARCHES else 15):
        part = Problem(KINDS[kind], valley, whole.x, max_iter=1, **NO_END)
        part.optimizer.load_state_dict(saved(whole.optimizer))
        result = whole.step()
        assert part.step() == result
        assert torch.equal(part.x, whole.x)
        if not result.iterations:
            break  # there is nothing lower
    if kind == "lbfgs":
        assert len(whole.optimizer.state_dict()["state"][0]["curvature"]["pairs"]) == 100


@every_kind
def test_a_state_of_other_parameters_is_refused(make: Make) -> None:
    problem = Problem(make, valley, start())
    problem.step()
    with pytest.raises(ValueError, match="the state is of 6 parameters; here are 7"):
        Problem(make, valley, start(7)).optimizer.load_state_dict(saved(problem.optimizer))


@pytest.mark.rows
@every_kind
def test_a_state_that_is_looked_at_within_a_step_changes_nothing_and_copies_have_it(make: Make) -> None:
    def look(optimizer: Minimizer) -> None:
        copied = copy.deepcopy(optimizer)
        torch.testing.assert_close(
            copied.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0, equal_nan=True
        )

    found = []
    for looks in (False, True):
        problem = Problem(make, valley, start(20), max_iter=30, **NO_END)
        if looks:
            problem.optimizer.callback = lambda _, problem=problem: look(problem.optimizer)
        problem.step()
        found.append(problem.x)
    assert torch.equal(*found)
