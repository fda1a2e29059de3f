"""Levenberg-Marquardt: what is its own."""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, LevenbergMarquardt, NonFiniteError, Result, Status, Term, extending
from batchopt.optim.squares import ResidualSquares
from batchopt_workers.functions.subspace import Cosines
from tests.backends.least_squares_contract import DATA, flow, misfit, terms
from tests.building import loaded
from tests.optim import reference
from tests.optim.kinds import KINDS, NO_END, Function, Problem, valley
from tests.workloads import Mlp

TIMES = torch.linspace(0.0, 3.0, 20, dtype=torch.float64)
START = torch.tensor([1.0, 0.2, 0.5], dtype=torch.float64)
VALLEY = torch.tensor([-1.2, 1.0], dtype=torch.float64)
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"geodesic": True}, {"dense": 0}, {"step": "longest", "geodesic": True}],
    ids=["dense", "geodesic", "products", "longest"],
)


def decay(x: torch.Tensor) -> torch.Tensor:
    """Of a curve that no parameters fit."""
    times = TIMES.to(x)
    return x[0] * torch.exp(-x[1] * times) + x[2] - (2 * torch.exp(-1.3 * times) + 0.1 * torch.sin(9 * times))


@pytest.mark.parametrize("residuals, start", [(decay, START), (valley, VALLEY)])
def test_steps_are_those_of_a_slow_one(residuals: Function, start: torch.Tensor) -> None:
    expected = reference.levenberg_marquardt(residuals, start, 0.01, 8)
    found: list[torch.Tensor] = []
    problem = Problem(KINDS["lm"], residuals, start, damping=0.01, max_iter=8, **NO_END)
    problem.optimizer.callback = lambda _: found.append(problem.x)
    problem.step()
    torch.testing.assert_close(torch.stack(found[: len(expected)]), torch.stack(expected), rtol=1e-8, atol=1e-10)


def test_a_linear_regression_from_0_is_one_step() -> None:
    rows, values = torch.stack([TIMES**power for power in range(3)], 1), torch.exp(-TIMES)
    problem = Problem(KINDS["lm"], lambda x: rows @ x - values, torch.zeros_like(START), max_iter=1, **NO_END)
    problem.step()
    expected = torch.linalg.lstsq(rows, values[:, None]).solution[:, 0]
    torch.testing.assert_close(problem.x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bend", [False, True])
@pytest.mark.parametrize("residuals, start", [(decay, START), (valley, VALLEY)])
def test_the_longest_steps_are_those_of_a_slow_one(residuals: Function, start: torch.Tensor, bend: bool) -> None:
    found: list[tuple[torch.Tensor, float]] = []
    problem = Problem(KINDS["lm"], residuals, start, step="longest", geodesic=bend, max_iter=3, **NO_END)
    problem.optimizer.callback = lambda point: found.append((problem.x, point.step))
    problem.step()
    x, scale, length = start, torch.zeros_like(start), 0.0
    for after, own in found:
        scale = torch.maximum(scale, torch.func.jacrev(residuals)(x).square().sum(0))
        x, length = reference.longest_step(residuals, x, scale, length or float((scale * x**2).sum().sqrt()), bend)
        torch.testing.assert_close(after, x, rtol=1e-9, atol=1e-10)
        assert own == pytest.approx(length, rel=1e-10)


@pytest.mark.parametrize("count, size", [(30, 12), (12, 30)], ids=["matrix", "rows"])
def test_singular_values_below_rounding_of_the_matrix_are_used(count: int, size: int) -> None:
    """Of the normal equations' matrix those below 1e-8 of the largest are rounding."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 12, generator=random).double()).Q for n in (count, size))
    rows = left * torch.logspace(0, -11, 12).double() @ right.T
    x = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    options: dict[str, Any] = {"scaling": "identity", "max_iter": 60, **NO_END}
    LevenbergMarquardt([x], step="longest", dense=29, **options).step(lambda: rows @ (x - right.sum(1)))
    along = right.T @ x.detach()
    torch.testing.assert_close(along[:11], torch.ones(11, dtype=torch.float64), rtol=1e-3, atol=0.0)


def test_steps_within_a_subspace_are_those_of_the_problem_along_its_vectors() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 20, generator=random, dtype=torch.float64)

    def residuals(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(rows @ x) - 0.5

    start = torch.linspace(-0.2, 0.2, 20, dtype=torch.float64)
    options: dict[str, Any] = {"step": "longest", "geodesic": True, "scaling": "identity", "max_iter": 1, **NO_END}
    x = nn.Parameter(start.clone())
    LevenbergMarquardt([x], dense=19, subspace=7, **options).step(lambda: residuals(x))
    basis = Cosines(20, 7, 0)
    vectors = torch.stack([basis.lift(unit) for unit in torch.eye(7, dtype=torch.float64)], 1)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close(basis.of(rows), rows @ vectors)
    along = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer = LevenbergMarquardt([along], **options)
    scale = (torch.func.jacrev(residuals)(start) @ vectors).square().sum(0).max()
    optimizer.state[along]["radius"] = float((scale * start.square().sum()).sqrt())
    optimizer.step(lambda: residuals(start + vectors @ along))
    torch.testing.assert_close(x.detach(), start + vectors @ along.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bounds, count", [([(-9.0, 9.0)], 3), (None, 2)])
def test_where_a_subspace_is_of_no_use_it_is_told(bounds: Any, count: int) -> None:
    parameters = [nn.Parameter(part.clone()) for part in (START[:count], START[count:])]
    optimizer = LevenbergMarquardt(parameters[:1], step="longest", dense=0, bounds=bounds)
    with pytest.raises(ValueError, match=r"give `dense`, or step='first'"):
        optimizer.step(ResidualSquares(lambda: decay(torch.cat(list[torch.Tensor](parameters))), parameters))


def test_a_parameter_that_was_frozen_is_not_moved_within_a_subspace() -> None:
    module = flow()
    optimizer = LevenbergMarquardt(module.parameters(), step="longest", dense=0)
    with loaded(module, None, DATA, terms=terms(), chunk_size=5) as opt:
        module.speed.requires_grad_(False)
        with pytest.raises(ValueError, match=r"none of them frozen"):
            optimizer.step(extending.closure(opt))


def test_lengths_at_which_f_is_not_finite_are_only_too_long() -> None:
    x = nn.Parameter(torch.tensor([20.0], dtype=torch.float64))
    optimizer = LevenbergMarquardt([x], step="longest")
    optimizer.step(lambda: x.log() - 1.0)
    result = optimizer.result
    assert result is not None and result.not_finite > 0 and result.f < 1e-20


def test_after_a_trial_that_failed_products_are_those_of_the_point_all_the_same() -> None:
    runs = [Problem(KINDS[kind], valley, VALLEY, max_iter=2, **NO_END) for kind in ("lm identity", "lm products")]
    assert [run.step().evaluations for run in runs] == [4, 4]


def test_the_second_order_turns_corners() -> None:
    """The valley of Rosenbrock is a parabola, whose bend is all that is second order."""
    runs = [Problem(KINDS["lm"], valley, VALLEY, geodesic=bends, **NO_END) for bends in (False, True)]
    straight, bent = (run.step().iterations for run in runs)
    assert bent < straight / 1.4


def test_damping_survives_another_function_if_it_is_told_to() -> None:
    problem = Problem(KINDS["lm"], decay, START, max_iter=3, when_data_change="keep", **NO_END)
    problem.step()
    problem.function = lambda x: decay(x) * 1.1
    result = problem.step()
    assert result.kept and not result.forgotten
    problem.optimizer.param_groups[0]["when_data_change"] = "forget"
    problem.function = decay
    result = problem.step()
    assert not result.kept and result.forgotten == ("the function changed between two steps",)


def test_a_second_order_that_is_not_finite_leaves_the_step_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(squares: ResidualSquares, directions: torch.Tensor) -> torch.Tensor:
        raise NonFiniteError("second derivative is not finite", 0, range(0), 0, 1)

    monkeypatch.setattr(ResidualSquares, "accelerations", bad)
    bent, straight = (Problem(KINDS["lm"], decay, START, geodesic=bends, **NO_END) for bends in (True, False))
    assert bent.step().f == straight.step().f


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


@pytest.mark.parametrize("size", [1e-150, 1e-170, 1e-300])
def test_directions_whose_squares_underflow_are_no_error(size: float) -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = nn.Parameter(torch.linspace(1.0, 2.0, 5, dtype=torch.float64) * size)
    LevenbergMarquardt([x], geodesic=True, tolerance_change=0.0).step(lambda: rows @ x)
    assert x.abs().max() <= 2 * size


@pytest.mark.rows
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


def evaluations_of_peaks(count: int, units: float) -> int:
    """How many evaluations the heights of `count` peaks, and the one width that they share, take in these units."""
    centers, at = torch.arange(count, dtype=torch.float64), torch.linspace(-1, count, 3 * count, dtype=torch.float64)
    unit = torch.cat([torch.ones(1), torch.logspace(0, units, count)]).double()

    def curve(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (x[1:] * torch.exp(-(((at[:, None] - centers) / x[0]) ** 2))).sum(1)
        return found

    expected = curve(torch.linspace(0.8, 1.2, count + 1, dtype=torch.float64))
    x = nn.Parameter(torch.full_like(unit, 0.9) * unit)
    optimizer = LevenbergMarquardt([x])
    optimizer.step(lambda: curve(x / unit) - expected)
    assert optimizer.result is not None and optimizer.result.f < 1e-16
    return optimizer.result.evaluations


@pytest.mark.slow
@pytest.mark.parametrize("count", [99, 100])
def test_units_do_not_matter_for_100_parameters_nor_for_101(count: int) -> None:
    assert evaluations_of_peaks(count, 6.0) == evaluations_of_peaks(count, 0.0) < 12


# ---- over a BatchOptimizer


@pytest.mark.slow
@pytest.mark.rows
@OPTIONS
def test_scales_and_first_damping(options: dict[str, Any]) -> None:
    def run(**given: Any) -> Result:
        lm = functools.partial(LevenbergMarquardt, max_iter=6, **given)
        with BatchOptimizer(flow(), terms=terms(), chunk_size=5, optimizer=lm) as opt:
            loss = opt.step(DATA)
            assert opt.result is not None and opt.result.f == loss and opt.result.iterations > 1
            return opt.result

    assert run(scaling="identity", tolerance_change=0.0, **options).f < run(damping=1e12).f / 2


@pytest.mark.slow
def test_its_steps_are_those_over_residuals_alone() -> None:
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


def test_accelerations_are_second_derivatives() -> None:
    module = Mlp(2, 5, 1).double()
    x, y = DATA["data"]
    with loaded(module, nn.MSELoss(), x, y, chunk_size=6) as opt:
        v = torch.linspace(-0.01, 0.02, len(opt.parameters), dtype=torch.float64)
        named = dict(module.named_parameters())
        parts = torch.split(v, [p.numel() for p in named.values()])
        slopes = {name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}

        def along(t: torch.Tensor) -> torch.Tensor:
            own = {name: p.detach() + t * slopes[name] for name, p in named.items()}
            found: torch.Tensor = (torch.func.functional_call(module, own, (x,)) - y)[:, 0]
            return found

        second = torch.func.jacrev(torch.func.jacrev(along))(torch.zeros((), dtype=torch.float64))
        rows = torch.autograd.grad((module(x) - y)[:, 0], [*named.values()], second / len(second))
        expected = torch.cat([row.flatten() for row in rows])
        torch.testing.assert_close(extending.closure(opt).accelerations(v[None])[0], expected, rtol=0.05, atol=1e-9)
        assert extending.closure(opt)().item() == opt.output


class Deadly:
    """Residuals in whose so manieth call in a worker that worker is killed, once."""

    def __init__(self, folder: Path, number: int) -> None:
        self.maker, self.fired, self.number, self.calls = os.getpid(), folder / "fired", number, 0

    def __call__(self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += os.getpid() != self.maker
        if self.calls == self.number and not self.fired.exists():
            self.fired.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return misfit(module, inputs, targets)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("number", [25, 3, 8, 16, 40])
def test_longest_steps_are_the_same_for_any_number_of_workers_and_after_a_kill(tmp_path: Path, number: int) -> None:
    def after(residual: Callable[..., torch.Tensor], workers: int) -> str:
        lm = functools.partial(LevenbergMarquardt, step="longest", geodesic=True, max_iter=2)
        with BatchOptimizer(
            flow(), terms={"data": Term(residual=residual)}, optimizer=lm, parallelize=workers, chunk_size=3
        ) as opt:
            opt.step({"data": DATA["data"]})
            return opt.fingerprint()

    found = {after(misfit, workers) for workers in (1, 2, 3)} | {after(Deadly(tmp_path, number), 2)}
    assert len(found) == 1 and (tmp_path / "fired").exists()


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
        parameters, max_iter=5, callback=lambda step: seen.append(step.f), **NO_END, **options
    )
    with loaded(module, None, DATA, terms=terms(), chunk_size=5, parallelize=workers) as opt:
        optimizer.step(extending.closure(opt))
    return seen


@pytest.mark.slow
@pytest.mark.rows
@OPTIONS
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
