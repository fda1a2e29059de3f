"""Bounds on parameters."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import LBFGS, BatchOptimizer, LevenbergMarquardt, Status
from batchopt.optim.bounds import Box
from batchopt.optim.curvature import Curvature
from tests.optim import reference
from tests.optim.kinds import NO_END, Function, Problem, logistic, logits, rosenbrock, start, valley, value
from tests.workloads import Mlp

INF = math.inf
LM = LevenbergMarquardt


@dataclass(frozen=True)
class Bounded:
    """f, or its residuals, of a vector in a box; with its minimum, the lower of two where there are two."""

    function: Function
    start: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    minima: tuple[float, ...]

    @property
    def of_squares(self) -> bool:
        return self.function(torch.tensor(self.start, dtype=torch.float64)).dim() > 0


def colville(x: torch.Tensor) -> torch.Tensor:
    """The residuals of a sum of squares in four variables."""
    a, b, c, d = x.unbind()
    return torch.stack([10 * (b - a**2), 1 - a, 90**0.5 * (d - c**2), 1 - c, 10**0.5 * (b + d - 2), 0.1**0.5 * (b - d)])


def gamma(x: torch.Tensor) -> torch.Tensor:
    """The residuals of a distribution function."""
    levels = torch.arange(1, 100).to(x) / 100
    places = 25 + (-50 * levels.log()) ** (2 / 3)
    return (-((places - x[1]) ** x[2]) / x[0]).exp() - levels


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sum().sin() + (x[0] - x[1]) ** 2 - 1.5 * x[0] + 2.5 * x[1] + 1


def logarithms(x: torch.Tensor) -> torch.Tensor:
    return ((x - 2).log() ** 2 + (10 - x).log() ** 2).sum() - x.prod() ** 0.2


# W. Hock and K. Schittkowski, "Test examples for nonlinear programming codes", Springer 1981, by their numbers.
PROBLEMS: dict[str, Bounded] = {
    "HS 1": Bounded(valley, (-2.0, 1.0), (-INF, -1.5), (INF, INF), (0.0,)),
    "HS 2": Bounded(valley, (-2.0, 1.0), (-INF, 1.5), (INF, INF), (0.0504261879, 4.9412293)),
    "HS 3": Bounded(lambda x: x[1] + 1e-5 * (x[1] - x[0]) ** 2, (10.0, 1.0), (-INF, 0.0), (INF, INF), (0.0,)),
    "HS 4": Bounded(lambda x: (x[0] + 1) ** 3 / 3 + x[1], (1.125, 0.125), (1.0, 0.0), (INF, INF), (8 / 3,)),
    "HS 5": Bounded(sine, (0.0, 0.0), (-1.5, -3.0), (4.0, 3.0), (-(3**0.5) / 2 - math.pi / 3,)),
    "HS 25": Bounded(gamma, (100.0, 12.5, 3.0), (0.1, 0.0, 0.0), (100.0, 25.6, 5.0), (0.0, 32.835)),
    "HS 38": Bounded(colville, (-3.0, -1.0, -3.0, -1.0), (-10.0,) * 4, (10.0,) * 4, (0.0,)),
    "HS 45": Bounded(lambda x: 2 - x.prod() / 120, (2.0,) * 5, (0.0,) * 5, (1.0, 2.0, 3.0, 4.0, 5.0), (1.0,)),
    "HS 110": Bounded(logarithms, (9.0,) * 10, (2.001,) * 10, (9.999,) * 10, (-45.77846971,)),
}
MAKES: dict[str, Callable[..., Any]] = {
    "lbfgs": LBFGS,
    "lbfgs armijo": lambda p, **options: LBFGS(p, line_search_fn="armijo", **options),
    "lm": LM,
    "lm geodesic": lambda p, **options: LM(p, geodesic=True, **options),
    "lm products": lambda p, **options: LM(p, dense=0, **options),
}


class Boxed(Problem):
    """A problem whose bounds are vectors of all elements; each point evaluated must be in the box."""

    def __init__(self, make: Any, function: Function, start: torch.Tensor, lower: Any, upper: Any, **options: Any):
        self.lower, self.upper = (
            torch.as_tensor(bound, dtype=torch.float64).to(start).expand(start.shape) for bound in (lower, upper)
        )
        pieces = (1, max(len(start) - 2, 1))
        pairs = list(zip(self.lower.tensor_split(pieces), self.upper.tensor_split(pieces), strict=True))
        super().__init__(make, function, start, bounds=pairs, **options)

    def found(self) -> torch.Tensor:
        assert self.inside
        return super().found()

    @property
    def inside(self) -> bool:
        return bool((self.lower <= self.x).all() and (self.x <= self.upper).all())

    @property
    def active(self) -> torch.Tensor:
        assert self.result.active is not None
        return torch.cat([*self.result.active.values()])


@pytest.mark.rows
@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[pytest.mark.nightly] * (make not in ("lbfgs", "lm"))) for make in MAKES]
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_minimum_is_the_published_one(name: str, make: str) -> None:
    problem = PROBLEMS[name]
    if make.startswith("lm") and not problem.of_squares:
        pytest.skip("no sum of squares")
    if (name, make) == ("HS 25", "lm products"):
        pytest.skip("the curvature at the start, by which products measure steps, is 1e-16 of that of the minimum")
    x = torch.tensor(problem.start, dtype=torch.float64)
    run = Boxed(MAKES[make], problem.function, x, problem.lower, problem.upper, max_iter=2000, **NO_END)
    f: list[float] = []
    run.optimizer.callback = lambda found: f.append(found.f)
    result = run.step()
    assert min(abs(result.f - minimum) for minimum in problem.minima) < 1e-6 * max(1.0, abs(result.f))
    assert run.inside and result.f <= min(run.values) + 1e-12 * abs(result.f)  # the search decides in the last digit
    assert all(after <= before + 1e-12 * abs(before) for before, after in itertools.pairwise(f))


def quadratic(n: int, condition: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of residuals, and their values at 0: the matrix has this condition, the minimum elements of about 1."""
    random = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]
    rows = turn * torch.logspace(0, 0.5 * math.log10(condition), n, dtype=torch.float64)
    rows = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0] @ rows.T
    return rows, -rows @ torch.randn(n, generator=random, dtype=torch.float64)


@pytest.mark.rows
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("seed", range(4))
def test_the_minimum_of_a_quadratic_is_that_of_all_active_sets(make: str, seed: int) -> None:
    rows, at = quadratic(5, 30.0, seed)
    lower, upper = torch.full((5,), -0.4, dtype=torch.float64), torch.full((5,), 0.3, dtype=torch.float64)
    expected = reference.box_quadratic(2 * rows.T @ rows, 2 * rows.T @ at, lower, upper)
    run = Boxed(MAKES[make], lambda x: rows @ x + at, torch.zeros(5).double(), lower, upper, max_iter=300, **NO_END)
    run.step()
    torch.testing.assert_close(run.x, expected, rtol=1e-6, atol=1e-7)
    at_bounds = (expected == lower) | (expected == upper)
    assert torch.equal(run.active, at_bounds) and at_bounds.any()
    assert torch.equal(run.x[at_bounds], expected[at_bounds])


@pytest.mark.parametrize("kept", [3, 20])
def test_the_step_within_a_box_is_the_minimum_of_the_model(kept: int) -> None:
    """Beside the matrix itself, inverted; with a history that has gone around."""
    rows, _ = quadratic(6, 100.0, 1)
    matrix, random = rows.T @ rows, torch.Generator().manual_seed(2)
    curvature = Curvature(6, kept, torch.float64, torch.device("cpu"))
    for _ in range(5):
        s = torch.randn(6, generator=random, dtype=torch.float64)
        curvature.add(s, torch.zeros(6).double(), matrix @ s)
    inverse = torch.stack([-curvature.times(unit, torch.empty(6).double()) for unit in torch.eye(6).double()])
    x, gradient = torch.zeros(6).double(), 30 * torch.randn(6, generator=random, dtype=torch.float64)
    box = Box(torch.full_like(x, -0.5), torch.full_like(x, 0.2))
    found = box.step(x, gradient, lambda held, moves: curvature.step(gradient, held, moves, 1.0))
    expected = reference.box_quadratic(torch.linalg.inv(inverse), gradient, box.lower, box.upper)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", MAKES)
def test_where_everything_is_at_a_bound_and_what_is_fixed(make: str, dtype: torch.dtype) -> None:
    """HS 38 with a bound on each side of its minimum, and a variable that cannot move."""
    lower, upper = torch.tensor([-2.0, 0.1, -2.0, 0.7]), torch.tensor([-0.1, 0.1, 0.1, 3.0])
    run = Boxed(MAKES[make], colville, torch.tensor([-3.0, -1.0, 9.0, 0.8], dtype=dtype), lower, upper)
    result = run.step()
    assert run.inside and result.status in (Status.GRADIENT, Status.CHANGE, Status.NO_DECREASE)
    slope = torch.func.grad(value(colville))(run.x)
    free = ~run.active
    assert run.active[1] and slope[free].abs().sum() < 1e-2 * slope.abs().max()
    assert ((slope >= 0) | (run.x > run.lower) | (lower == upper))[run.active].all()
    corner = Boxed(MAKES[make], logits, torch.ones(3, dtype=dtype), 1.0, 2.0)
    assert corner.step().status is Status.GRADIENT and corner.active.all() and corner.result.gradient == 0
    nowhere = Boxed(MAKES[make], logits, torch.ones(3, dtype=dtype), 1.0, 1.0)
    assert nowhere.step().evaluations == 1 and nowhere.active.all()


@pytest.mark.parametrize("make", [LBFGS, LM])
def test_a_start_outside_moves_to_the_nearest_point_and_one_inside_stays(make: Any) -> None:
    seen: list[torch.Tensor] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach())
        return logits(x)

    Boxed(make, look, start(), -1.0, 0.5, max_iter=1).step()
    assert torch.equal(seen[0], start().clamp(-1.0, 0.5))
    # an element at a bound whose gradient points inwards is not active
    leaving = Boxed(LBFGS, lambda x: (x - 2).square().sum(), torch.zeros(3).double(), 0.0, 3.0, max_iter=20)
    leaving.step()
    assert not leaving.active.any() and leaving.x == pytest.approx([2.0] * 3)


@pytest.mark.parametrize("function", [rosenbrock, logistic])
def test_infinite_bounds_are_none_to_the_bit(function: Function) -> None:
    runs = [Problem(LBFGS, function, start(), bounds=bounds) for bounds in (None, [(None, INF), (-INF, INF), None])]
    assert runs[0].step() == runs[1].step() and torch.equal(runs[0].x, runs[1].x)
    assert runs[1].result.active is None


# ---- over modules


def test_names_and_parameters_say_which_is_bounded() -> None:
    x, y = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double(), torch.ones(30, 4).double()

    def found(named: bool) -> tuple[str, list[Any], list[bool]]:
        torch.manual_seed(0)
        module = Mlp().double()
        bounds: Any = {"second.bias" if named else module.second.bias: (None, torch.full((4,), -0.5))}
        optimizer = LBFGS(module.named_parameters() if named else module.parameters(), max_iter=1, bounds=bounds)
        with BatchOptimizer(module, nn.MSELoss(), optimizer=optimizer, chunk_size=7) as opt:
            opt.step(x, y)
            assert module.second.bias.max() <= -0.5
            assert optimizer.result is not None and optimizer.result.active is not None
            ((name, active),) = optimizer.result.active.items()
            return opt.fingerprint(), [name], active.tolist()

    by_name, by_parameter = found(True), found(False)
    assert by_name[1] == ["second.bias"] and by_parameter[1] == [3]
    assert by_name[0] == by_parameter[0] and by_name[2] == by_parameter[2] and any(by_name[2])


def test_copies_have_the_bounds_and_states_do_not() -> None:
    run = Boxed(LBFGS, valley, start(), -1.0, 0.5, max_iter=3)
    run.step()
    assert "bounds" not in run.optimizer.state_dict()["param_groups"][0]
    twin = copy.deepcopy(run.optimizer)
    assert twin.result == run.result
    other = Boxed(LBFGS, valley, start(), -1.0, 0.4, max_iter=3)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    other.step()
    assert other.inside
