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
        self._optimizer = None if make is None else make(self.parameters)
        self.undo = Rollback(self.vector, self._optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None
        return self._optimizer

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
        for _ in range(count):
            self.optimizer.step(self.closure)  # type: ignore[arg-type]  # annotated as returning a float

    def state(self) -> list[dict[str, Any]]:
        """What the optimizer remembers of each parameter."""
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self.parameters]

    def present(self) -> Any:
        """All that an undone step must leave as it was, as bytes."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return bits([self.vector, self.state() if self._optimizer else [], options])


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
def test_after_detours_everything_runs_on_as_without_them(make: Factory) -> None:
    straight, detour = Problem(make), Problem(make)
    for steps, detours in ((0, 1), (1, 2), (1, 0), (4, 3)):
        straight.steps(steps)
        detour.steps(steps)
        for count in range(detours):
            detour.undo.take()
            detour.steps(count + 1)
            assert detour.present() != straight.present()
            detour.undo.back()
            assert detour.present() == straight.present() and len(detour.optimizer.state) == len(
                straight.optimizer.state
            )
        detour.undo.take()  # of a step that succeeds
    straight.steps(5)
    detour.steps(5)
    assert detour.present() == straight.present()
    assert all(ours is its for ours, its in zip(detour.parameters, held(detour.optimizer), strict=True))
    detour.vector.fill_(4.0)
    assert all((parameter == 4.0).all() for parameter in detour.parameters)


def held(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@each_optimizer
def test_a_step_that_fails_in_the_middle_is_undone(make: Factory) -> None:
    problem = Problem(make)
    problem.steps(3)
    before, calls = problem.present(), []
    problem.undo.take()

    def failing() -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return problem.closure()

    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            problem.optimizer.step(failing)  # type: ignore[arg-type]
    assert problem.present() != before
    problem.undo.back()
    assert problem.present() == before


def as_by_a_scheduler(problem: Problem) -> None:
    for group in problem.optimizer.param_groups:
        group["lr"] *= 0.5


def written_in_place(problem: Problem) -> None:
    problem.optimizer.param_groups[0]["lr"].fill_(7.0)


def loaded_state(problem: Problem) -> None:
    other = Problem(OPTIMIZERS["adam"])
    other.steps(5)
    problem.optimizer.load_state_dict(other.optimizer.state_dict())


def scaled(problem: Problem) -> None:
    problem.vector.mul_(3.0)


@pytest.mark.parametrize(
    "name, change",
    [
        ("sgd in two groups", as_by_a_scheduler),
        ("adam with a tensor as lr", written_in_place),
        ("adam", loaded_state),
        (None, scaled),
    ],
)
def test_what_was_changed_since_goes_back(name: str | None, change: Callable[[Problem], None]) -> None:
    problem = Problem(OPTIMIZERS[name] if name else None)
    if name:
        problem.steps(2)
    problem.undo.take()
    before = problem.present()
    change(problem)
    assert problem.present() != before
    problem.undo.back()
    assert problem.present() == before
