"""L-BFGS: what is its own."""

from __future__ import annotations

import pytest
import torch

import batchopt
from batchopt.optim.minimizer import Status
from tests.optim import reference
from tests.optim.kinds import Problem, logistic, start
from tests.optim.test_descent import EXACT


def test_without_a_search_the_iterates_are_those_of_the_two_loops() -> None:
    x = start()
    problem = Problem(batchopt.LBFGS, logistic, x, line_search_fn=None, lr=0.7, max_iter=12, history_size=4)
    points = [x]
    problem.optimizer.callback = lambda iteration: points.append(problem.x)
    problem.step()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    _, gradient = reference.value_and_gradient(logistic, x)
    for point in points[1:]:
        direction = reference.two_loops(pairs, gradient)
        step = 0.7 if pairs else 0.7 * min(1.0, 1.0 / gradient.norm().item())
        after = x + step * direction
        torch.testing.assert_close(point, after, rtol=1e-8, atol=1e-10)
        _, new = reference.value_and_gradient(logistic, point)
        pairs = [*pairs, (point - x, new - gradient)][-4:]
        x, gradient = point, new


@pytest.mark.slow
@pytest.mark.parametrize("l1", [0.003, 0.02, 0.1, 1.0])
def test_l1_is_the_minimum_of_soft_thresholding_with_its_zeros(l1: float) -> None:
    problem = Problem(batchopt.LBFGS, logistic, start(12), l1=l1, **EXACT)
    result = problem.step()
    expected = reference.proximal_gradient(logistic, start(12), l1, 0.5, 5000)
    torch.testing.assert_close(problem.x, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(problem.x == 0, expected == 0)
    assert result.f == pytest.approx(logistic(expected).item() + l1 * expected.abs().sum().item(), rel=1e-9)
    assert result.status in (Status.GRADIENT, Status.NO_DECREASE)


def test_a_state_of_torch_is_taken_over_as_far_as_it_goes() -> None:
    x = start().requires_grad_()
    theirs = torch.optim.LBFGS([x], max_iter=3, history_size=7)

    def closure() -> torch.Tensor:
        theirs.zero_grad()
        f = logistic(x)
        f.backward()  # type: ignore[no-untyped-call]
        return f

    theirs.step(closure)  # type: ignore[no-untyped-call]
    problem = Problem(batchopt.LBFGS, logistic, x.detach())
    state = theirs.state_dict()
    state["param_groups"][0]["params"] = [0, 1, 2]
    problem.optimizer.load_state_dict(state)
    assert problem.optimizer.param_groups[0]["history_size"] == 7
    assert problem.optimizer.param_groups[0]["l1"] == 0.0
    assert problem.step().f < logistic(x.detach()).item()


def test_noise_that_is_more_than_rounding_is_learned_from_a_search_in_vain() -> None:
    """f has two digits less than its dtype, its gradient all of them."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        f = logistic(x)
        return f + (f.detach() * 1e4).round() / 1e4 - f.detach()

    problem = Problem(batchopt.LBFGS, noisy, start(), tolerance_grad=1e-4, tolerance_change=0.0, max_iter=200)
    result = problem.step()
    expected = reference.lbfgs(logistic, start(), 500)
    torch.testing.assert_close(problem.x, expected, rtol=0.05, atol=0.05)
    assert result.f == min(problem.values)
