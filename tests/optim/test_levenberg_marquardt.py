"""Levenberg-Marquardt: its steps are those of a slow one, and it keeps what all optimizers here promise."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Iteration, LevenbergMarquardt, NonFiniteError, Result, Status, Term
from tests.backends.least_squares_contract import DATA, flow, misfit, terms
from tests.building import loaded
from tests.optim import reference
from tests.workloads import Mlp

Residuals = Callable[[torch.Tensor], torch.Tensor]
TIMES = torch.linspace(0.0, 3.0, 20, dtype=torch.float64)
START = torch.tensor([1.0, 0.2, 0.5], dtype=torch.float64)
EXACT: dict[str, Any] = {"tolerance_grad": 0.0, "tolerance_change": 0.0}


def decay(x: torch.Tensor) -> torch.Tensor:
    """Of a curve that no parameters fit."""
    times = TIMES.to(x)
    return x[0] * torch.exp(-x[1] * times) + x[2] - (2 * torch.exp(-1.3 * times) + 0.1 * torch.sin(9 * times))


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


class Plain:
    """A closure with the normal equations, by torch.func in this process."""

    def __init__(self, residuals: Residuals, start: torch.Tensor, **options: Any) -> None:
        self.residuals, self.values = residuals, [math.nan]
        self.parameter = nn.Parameter(start.clone())
        self.parameters = [self.parameter]
        self.optimizer = LevenbergMarquardt([self.parameter], **options)

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        f = self.residuals(self.parameter).square().mean()
        f.backward()  # type: ignore[no-untyped-call]
        self.values.append(f.item())
        return f

    @property
    def x(self) -> torch.Tensor:
        return self.parameter.detach().clone()

    def _jacobian(self) -> torch.Tensor:
        with torch.enable_grad():
            found: torch.Tensor = torch.func.jacrev(self.residuals)(self.x)
        return found

    def normal(self, limit: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        r, j = self.residuals(self.x).double(), self._jacobian().double()
        return float(r @ r / len(r)), j.T @ r / len(r), j.T @ j / len(r)

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        return (self.normal(0)[2] @ v.double()).to(v)

    def acceleration(self, v: torch.Tensor) -> torch.Tensor:
        x, j = self.x, self._jacobian()

        def along(t: torch.Tensor) -> torch.Tensor:
            return self.residuals(x + t * v)

        zero = torch.zeros((), dtype=x.dtype)
        second = torch.func.jacrev(torch.func.jacrev(along))(zero)
        found: torch.Tensor = j.T @ second / len(second)
        return found

    def step(self) -> Result:
        self.optimizer.step(self)
        assert self.optimizer.result is not None
        return self.optimizer.result


@pytest.mark.parametrize("residuals, start", [(decay, START), (rosenbrock, torch.tensor([-1.2, 1.0]).double())])
def test_steps_are_those_of_a_slow_one(residuals: Residuals, start: torch.Tensor) -> None:
    expected = reference.levenberg_marquardt(residuals, start, 0.01, 8)
    found: list[torch.Tensor] = []
    problem = Plain(residuals, start, damping=0.01, scaling="diagonal", max_iter=8, **EXACT)
    problem.optimizer.callback = lambda _: found.append(problem.x)
    problem.step()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-8, atol=1e-10)


@pytest.mark.sampled
@pytest.mark.parametrize("geodesic", [False, True])
@pytest.mark.parametrize("scaling", ["diagonal", "identity"])
@pytest.mark.parametrize("dense", [0, 5000])
def test_the_minimum(dense: int, scaling: str, geodesic: bool) -> None:
    problem = Plain(decay, START, dense=dense, scaling=scaling, geodesic=geodesic, **EXACT)
    result = problem.step()
    assert result.status in (Status.NO_DECREASE, Status.GRADIENT)
    _, gradient = reference.value_and_gradient(lambda x: decay(x).square().mean(), problem.x)
    assert gradient.abs().max() < 1e-9
    assert result.f == min(problem.values[1:]) or result.f == pytest.approx(min(problem.values[1:]), rel=1e-14)
    assert len(problem.values) - 1 == result.evaluations


def test_the_second_order_turns_corners() -> None:
    """The valley of Rosenbrock is a parabola, whose bend is all that is second order."""
    start = torch.tensor([-1.2, 1.0]).double()
    runs = [Plain(rosenbrock, start, geodesic=bends, scaling="diagonal", **EXACT) for bends in (False, True)]
    straight, bent = (run.step().iterations for run in runs)
    assert bent < straight / 1.5


def test_result_callback_and_limits() -> None:
    seen: list[Iteration] = []
    problem = Plain(decay, START, max_iter=3, callback=seen.append, **EXACT)
    result = problem.step()
    assert result.status is Status.ITERATIONS and result.iterations == 3 == len(seen)
    assert result.f == decay(problem.x).square().mean().item() == seen[-1].f
    assert [one.number for one in seen] == [1, 2, 3] and seen[-1].change == result.change
    problem.step()
    assert seen[3].number == 4
    for limit in (1, 2, 4):
        problem = Plain(rosenbrock, torch.tensor([-1.2, 1.0]).double(), max_eval=limit, max_iter=None, **EXACT)
        result = problem.step()
        assert result.status is Status.EVALUATIONS and result.evaluations == limit == len(problem.values) - 1
        assert result.f == min(problem.values[1:]) == rosenbrock(problem.x).square().mean().item()
    problem = Plain(decay, START, callback=lambda _: True)
    assert problem.step().status is Status.CALLBACK
    problem = Plain(decay, START, tolerance_grad=1e-3, tolerance_change=0.0)
    assert problem.step().status is Status.GRADIENT


def test_a_trial_that_is_not_finite_makes_the_next_step_shorter() -> None:
    def walled(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([10 * (torch.log(x[0] - 2) + 1), (x[0] - 2 - math.exp(-1.0)) / 100])

    problem = Plain(walled, torch.tensor([5.0]).double(), **EXACT, damping=1e-9)
    result = problem.step()
    assert result.not_finite > 0 and problem.x.item() == pytest.approx(2 + math.exp(-1.0), rel=1e-12)
    problem = Plain(lambda x: x / 0, START)
    result = problem.step()
    assert result.status is Status.NOT_FINITE and torch.equal(problem.x, START)


def test_an_exception_leaves_the_best_point() -> None:
    problem = Plain(decay, START, **EXACT)
    original = problem.residuals

    def raises(x: torch.Tensor) -> torch.Tensor:
        if len(problem.values) == 5:
            raise ArithmeticError
        return original(x)

    problem.residuals = raises
    with pytest.raises(ArithmeticError):
        problem.step()
    assert decay(problem.x).square().mean().item() == min(problem.values[1:])


def test_another_function_is_recognised_and_damping_survives_it_if_it_is_told_to() -> None:
    problem = Plain(decay, START, max_iter=3, when_data_change="keep", **EXACT)
    problem.step()
    problem.residuals = lambda x: decay(x) * 1.1
    result = problem.step()
    assert result.kept and not result.forgotten
    problem.optimizer.param_groups[0]["when_data_change"] = "forget"
    for residuals in (decay, lambda x: 100 * decay(x * 0.9)):
        problem.residuals = residuals
        result = problem.step()
        assert not result.kept and result.forgotten == ("the function changed between two steps",)


def test_a_second_order_that_is_not_finite_leaves_the_step_straight() -> None:
    class Bad(Plain):
        def acceleration(self, v: torch.Tensor) -> torch.Tensor:
            raise NonFiniteError("second derivative is not finite", 0, range(0), 0, 1)

    assert Bad(decay, START, geodesic=True, **EXACT).step().f == Plain(decay, START, **EXACT).step().f


class Penalised(BatchOptimizer):
    """Adds to f what is no square of a residual."""

    def reduce(self, answers: Any) -> torch.Tensor:
        return super().reduce(answers) + 1.0


def test_where_f_is_another_sum_it_is_told_before_anything_moves() -> None:
    with Penalised(flow(), terms={"a": Term(residual=misfit)}, optimizer="lm") as opt:
        before = opt.fingerprint()
        with pytest.raises(ValueError, match=r"the sum of the squares is .* where f is"):
            opt.step({"a": DATA["data"]})
        assert opt.fingerprint() == before


# On workers


def run(parallelize: int, **options: Any) -> tuple[float, str, Result]:
    with BatchOptimizer(
        flow(),
        terms=terms(),
        parallelize=parallelize,
        chunk_size=5,
        optimizer=lambda params: LevenbergMarquardt(params, max_iter=6, **options),
    ) as opt:
        loss = opt.step(DATA)
        assert isinstance(opt.optimizer, LevenbergMarquardt) and opt.optimizer.result is not None
        return loss, opt.fingerprint(), opt.optimizer.result


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"geodesic": True}, {"dense": 0}], ids=["dense", "geodesic", "products"])
def test_the_bits_are_those_of_one_process(options: dict[str, Any]) -> None:
    loss, fingerprint, result = run(1, **options)
    assert result.f == loss and result.iterations > 1
    assert run(2, **options) == (loss, fingerprint, result)
    assert run(1, scaling="identity", tolerance_change=0.0, **options)[0] < run(1, damping=1e12)[0] / 2


def test_accelerations_are_second_derivatives() -> None:
    module = Mlp(2, 5, 1).double()
    x, y = DATA["data"]
    with loaded(module, nn.MSELoss(), x, y, chunk_size=6) as opt:
        v = torch.linspace(-0.01, 0.02, len(opt.parameters), dtype=torch.float64)
        names = [name for name, _ in module.named_parameters()]
        shapes = [p.shape for p in module.parameters()]

        def residuals(flat: torch.Tensor) -> torch.Tensor:
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            own = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
            found: torch.Tensor = (torch.func.functional_call(module, own, (x,)) - y)[:, 0]
            return found

        expected = Plain(residuals, opt.parameters).acceleration(v)
        torch.testing.assert_close(opt.closure.acceleration(v), expected, rtol=0.05, atol=1e-9)
        assert opt.closure().item() == opt.output


Pick = Callable[[list[nn.Parameter]], list[nn.Parameter]]
ORDERS: dict[str, Pick] = {
    "reversed": lambda parameters: parameters[::-1],
    "biases first": lambda parameters: sorted(parameters, key=lambda p: p.dim()),
    "some of them": lambda parameters: [parameters[4], parameters[2], parameters[0]],
    "one that is no part of f": lambda parameters: [parameters[3], nn.Parameter(torch.ones(3).double()), parameters[2]],
}


def found(module: nn.Module, parameters: list[nn.Parameter], workers: int, **options: Any) -> list[float]:
    """f after each iteration over these parameters."""
    seen: list[float] = []
    optimizer = LevenbergMarquardt(
        parameters, max_iter=5, callback=lambda step: seen.append(step.f), **EXACT, **options
    )
    with loaded(module, None, DATA, terms=terms(), chunk_size=5, parallelize=workers) as opt:
        optimizer.step(opt.closure)
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"geodesic": True}, {"dense": 0}], ids=["dense", "geodesic", "products"])
@pytest.mark.parametrize("pick", ORDERS.values(), ids=ORDERS)
def test_parameters_may_be_some_in_any_order(pick: Pick, options: dict[str, Any]) -> None:
    """The steps are those over the same parameters in the module's order, the others being frozen."""
    workers = 2 if pick is ORDERS["biases first"] else 1
    one, other = flow(), flow()
    steps = found(one, pick([*one.parameters()]), workers, **options)
    picked = {id(p) for p in pick([*other.parameters()])}
    for parameter in other.parameters():
        parameter.requires_grad_(id(parameter) in picked)
    expected = found(other, [p for p in other.parameters() if p.requires_grad], workers, **options)
    assert len(steps) > 3 and steps == pytest.approx(expected, rel=1e-5)
    for found_one, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found_one.detach(), right.detach(), rtol=1e-3, atol=1e-4)


# ---- a closure that returns residuals


@pytest.mark.parametrize("options", [{}, {"geodesic": True}, {"dense": 0}, {"scaling": "diagonal"}])
def test_a_closure_that_returns_residuals_needs_no_batch_optimizer(options: dict[str, Any]) -> None:
    times = torch.linspace(0.0, 4.0, 50, dtype=torch.float64)
    seen = 3.0 * torch.exp(-0.7 * times)
    a, b = (nn.Parameter(torch.tensor([1.0], dtype=torch.float64)) for _ in range(2))
    optimizer = LevenbergMarquardt([b, a], **options)
    first = optimizer.step(lambda: a * torch.exp(-b * times) - seen)
    assert float(first) == pytest.approx(float((torch.exp(-times) - seen).square().sum()))
    assert [a.item(), b.item()] == pytest.approx([3.0, 0.7], rel=1e-6)
    assert optimizer.result is not None and optimizer.result.status in (Status.GRADIENT, Status.CHANGE)


def test_its_steps_are_those_over_a_batch_optimizer() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 6, dtype=torch.float64), torch.randn(30, 4, dtype=torch.float64)
    alone = Mlp().double()
    module = copy.deepcopy(alone)
    LevenbergMarquardt(alone.parameters(), max_iter=8).step(lambda: alone(x) - y)
    few = functools.partial(LevenbergMarquardt, max_iter=8)
    with BatchOptimizer(module, nn.MSELoss(reduction="sum"), optimizer=few, chunk_size=7) as opt:
        opt.step(x, y)
    for one, two in zip(alone.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_of_any_precision_have_products(dtype: torch.dtype) -> None:
    x = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=dtype))
    optimizer = LevenbergMarquardt([x], dense=0)
    optimizer.step(lambda: rosenbrock(x))
    assert optimizer.result is not None and optimizer.result.status is Status.CHANGE
    torch.testing.assert_close(x.detach(), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("size", [1e-150, 1e-170, 1e-300])
def test_directions_whose_squares_underflow_are_no_error(size: float) -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = nn.Parameter(torch.linspace(1.0, 2.0, 5, dtype=torch.float64) * size)
    LevenbergMarquardt([x], geodesic=True, tolerance_change=0.0).step(lambda: rows @ x)
    assert x.abs().max() <= 2 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power, most", [(1, 12), (2, 44)])
@pytest.mark.parametrize("of_r, of_x", [(0, 0), (30, -20), (-30, 20)])
def test_where_nothing_is_left_it_has_converged(
    of_r: int, of_x: int, power: int, most: int, dtype: torch.dtype
) -> None:
    """f and x are 0 at the minimum: fractions of them say nothing."""
    x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype) * 2.0**of_x)
    optimizer = LevenbergMarquardt([x])
    first = float(optimizer.step(lambda: (x * 2.0**-of_x) ** power * 2.0**of_r))
    result = optimizer.result
    assert result is not None and result.status is Status.CHANGE and result.evaluations <= most
    assert result.f <= torch.finfo(dtype).eps ** 2 * first
