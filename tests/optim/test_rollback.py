"""Going back to the start of a step: afterwards everything runs on as if the step had never been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import batchopt
from batchopt.optim.curvature import Curvature
from batchopt.optim.rollback import Rollback

LENGTHS = [3, 2]
Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Problem:
    """Five unknowns in one vector, an optimizer over two parameters that are views of it, and what undoes its steps."""

    def __init__(self, make: Factory | None) -> None:
        self.vector = torch.linspace(-1.5, 1.25, sum(LENGTHS), dtype=torch.float64)
        self.parameters = [torch.nn.Parameter(view) for view in torch.split(self.vector, LENGTHS)]
        self.optimizer = None if make is None else make(self.parameters)
        self.undo = Rollback(self.vector, self.optimizer)

    def f(self) -> torch.Tensor:
        x, y = self.parameters
        return (x**4).sum() + (x[:2] * y).sin().sum() + (y - 0.3).pow(2).sum()

    def closure(self) -> torch.Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.f()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def steps(self, count: int) -> None:
        assert self.optimizer is not None
        for _ in range(count):
            self.optimizer.step(self.closure)  # type: ignore[arg-type]  # annotated as returning a float

    def state(self) -> list[dict[str, Any]]:
        """What the optimizer remembers of each parameter."""
        assert self.optimizer is not None
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self.parameters]

    def present(self) -> Any:
        """All that an undone step must leave as it was, as bytes."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return bits([self.vector, self.state() if self.optimizer else [], options])


def bits(value: Any) -> Any:
    """The value with its tensors as bytes, to compare."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, Curvature):
        value = value.state_dict()
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def two_groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """With learning rates of their own."""
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}]


def lbfgs(search: str | None, history: int = 3, lr: float = 0.1) -> Factory:
    """Few iterations a step, and a history that is soon full."""
    return lambda p: torch.optim.LBFGS(p, lr=lr, max_iter=2, history_size=history, line_search_fn=search)


OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "sgd in two groups": lambda p: torch.optim.SGD(two_groups(p), lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adam, all at once": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "lbfgs": lbfgs(None),
    "lbfgs with strong_wolfe": lbfgs("strong_wolfe", lr=1.0),
    "lbfgs with a long history": lbfgs("strong_wolfe", history=100, lr=1.0),
    "our lbfgs": lambda p: batchopt.LBFGS(p, max_iter=2, history_size=3),
    "our lbfgs with a long history": lambda p: batchopt.LBFGS(p, max_iter=2),
    "our lbfgs with l1": lambda p: batchopt.LBFGS(p, max_iter=2, history_size=3, l1=0.01),
    "cg": lambda p: batchopt.CG(p, max_iter=2),
    "ssbroyden": lambda p: batchopt.SSBroyden(p, max_iter=2),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@each_optimizer
def test_after_a_detour_everything_runs_on_as_without_it(make: Factory) -> None:
    for before in (0, 1, 5):
        straight, detour = Problem(make), Problem(make)
        straight.steps(before)
        detour.steps(before)
        detour.undo.take()
        detour.steps(3)
        assert detour.present() != straight.present()
        detour.undo.back()
        assert detour.present() == straight.present()
        straight.steps(5)
        detour.steps(5)
        assert detour.present() == straight.present()


@each_optimizer
def test_any_number_of_detours_may_be_made_on_the_way(make: Factory) -> None:
    straight, detour = Problem(make), Problem(make)
    for detours in (1, 2, 0, 3):
        straight.steps(1)
        detour.steps(1)
        for count in range(detours):
            detour.undo.take()
            detour.steps(count + 1)
            detour.undo.back()
        detour.undo.take()  # of a step that succeeds
        assert detour.present() == straight.present()


@each_optimizer
def test_a_step_that_fails_in_the_middle_is_undone(make: Factory) -> None:
    problem = Problem(make)
    problem.steps(3)
    before = problem.present()
    problem.undo.take()
    calls = 0

    def failing() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt
        return problem.closure()

    assert problem.optimizer is not None
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            problem.optimizer.step(failing)  # type: ignore[arg-type]
    assert problem.present() != before
    problem.undo.back()
    assert problem.present() == before


@each_optimizer
def test_an_optimizer_that_never_stepped_remembers_nothing_again(make: Factory) -> None:
    problem = Problem(make)
    problem.undo.take()
    problem.steps(2)
    problem.undo.back()
    assert problem.optimizer is not None
    assert len(problem.optimizer.state) == 0


def test_the_optimizer_goes_back_to_what_was_taken_last() -> None:
    problem = Problem(OPTIMIZERS["adam"])
    problem.undo.take()
    problem.steps(2)
    problem.undo.take()
    last = problem.present()
    problem.steps(2)
    problem.undo.back()
    assert problem.present() == last


def test_a_learning_rate_that_a_scheduler_changed_is_restored() -> None:
    problem = Problem(OPTIMIZERS["sgd in two groups"])
    assert problem.optimizer is not None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(problem.optimizer, gamma=0.5)
    problem.steps(1)
    problem.undo.take()
    problem.steps(1)
    scheduler.step()
    assert [group["lr"] for group in problem.optimizer.param_groups] == [0.01, 0.005]
    problem.undo.back()
    assert [group["lr"] for group in problem.optimizer.param_groups] == [0.02, 0.01]


def test_a_learning_rate_that_is_written_in_place_is_restored() -> None:
    problem = Problem(OPTIMIZERS["adam with a tensor as lr"])
    assert problem.optimizer is not None
    (group,) = problem.optimizer.param_groups
    problem.undo.take()
    group["lr"].fill_(7.0)
    problem.undo.back()
    assert group["lr"].item() == pytest.approx(0.05)


def test_the_optimizer_keeps_its_parameters_which_stay_views_of_the_vector() -> None:
    problem = Problem(OPTIMIZERS["lbfgs with strong_wolfe"])
    problem.undo.take()
    problem.steps(2)
    problem.undo.back()
    assert problem.optimizer is not None
    (group,) = problem.optimizer.param_groups
    assert all(ours is its for ours, its in zip(problem.parameters, group["params"], strict=True))
    problem.vector.fill_(4.0)
    assert all((parameter == 4.0).all() for parameter in problem.parameters)


def test_state_that_was_loaded_since_is_replaced_too() -> None:
    problem, other = Problem(OPTIMIZERS["adam"]), Problem(OPTIMIZERS["adam"])
    problem.steps(2)
    other.steps(5)
    problem.undo.take()
    before = problem.present()
    assert problem.optimizer is not None and other.optimizer is not None
    problem.optimizer.load_state_dict(other.optimizer.state_dict())
    assert problem.present() != before
    problem.undo.back()
    assert problem.present() == before


def test_without_an_optimizer_the_parameters_alone_are_restored() -> None:
    problem = Problem(None)
    before = problem.present()
    problem.undo.take()
    problem.vector.mul_(3.0)
    problem.undo.back()
    assert problem.present() == before


def kept_memory(undo: Rollback) -> list[int]:
    """Where the copies of tensors are."""
    values = [value for state in undo._state.values() for value in state.values()]
    return [undo._copy.data_ptr(), *(value.data_ptr() for value in values if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize("name, tensors", [("sgd with momentum", 2), ("adam", 8), ("lbfgs with strong_wolfe", 3)])
def test_taking_again_uses_the_same_memory_again(name: str, tensors: int) -> None:
    problem = Problem(OPTIMIZERS[name])
    problem.steps(3)
    problem.undo.take()
    first = kept_memory(problem.undo)
    assert len(first) >= 1 + tensors
    for _ in range(3):
        problem.steps(1)
        problem.undo.take()
        assert kept_memory(problem.undo) == first


def test_what_was_put_back_is_not_overwritten_by_the_next_take() -> None:
    straight, detour = Problem(OPTIMIZERS["adam"]), Problem(OPTIMIZERS["adam"])
    for problem in (straight, detour):
        problem.steps(2)
    detour.undo.take()
    detour.steps(1)
    detour.undo.back()
    detour.undo.take()
    theirs = {v.data_ptr() for state in detour.state() for v in state.values() if isinstance(v, torch.Tensor)}
    assert theirs.isdisjoint(kept_memory(detour.undo))
    straight.steps(1)
    detour.steps(1)
    assert detour.present() == straight.present()


@pytest.mark.parametrize("kind", [torch.zeros(3, dtype=torch.float32), torch.zeros(1, dtype=torch.float64)])
def test_memory_of_another_kind_is_not_used_again(kind: torch.Tensor) -> None:
    problem = Problem(OPTIMIZERS["sgd with momentum"])
    problem.steps(1)
    assert problem.optimizer is not None
    state = problem.optimizer.state[problem.parameters[0]]
    momentum = state["momentum_buffer"]
    state["momentum_buffer"] = kind
    problem.undo.take()
    state["momentum_buffer"] = momentum
    problem.undo.take()
    before = problem.present()
    state["momentum_buffer"] = kind
    problem.undo.back()
    assert problem.present() == before
