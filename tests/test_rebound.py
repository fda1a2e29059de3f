"""Parameters that are given other memory or are replaced after set-up: X follows them, or there is an error at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from batchopt import BatchOptimizer
from batchopt.errors import BatchoptError
from tests.building import loaded

X = torch.linspace(-1, 1, 30).view(10, 3)
Y = torch.linspace(0, 1, 20).view(10, 2)
WORKERS = [1, 2]


def net() -> Any:
    """A module whose layers are named by their index."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def build(module: nn.Module, workers: int = 1, **options: Any) -> BatchOptimizer:
    return BatchOptimizer(
        module, nn.MSELoss(), **{"optimizer": None, "parallelize": workers, "chunk_size": 5, **options}
    )


def loss(module: nn.Module) -> float:
    """What plain torch computes now."""
    with torch.no_grad():
        found: float = nn.functional.mse_loss(module(X), Y).item()
    return found


def rebind(module: nn.Module) -> None:
    """Give every parameter other memory, with other values."""
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5 + 0.25


def is_x(opt: BatchOptimizer) -> bool:
    """Whether the module's parameters are views of X, both in value and by memory."""
    parameters = list(opt.module.parameters())
    x = opt.parameters
    before = x.clone()
    x.add_(1)
    follows = torch.equal(parameters_to_vector(parameters), x)
    x.copy_(before)
    return follows and torch.equal(parameters_to_vector(parameters), before)


def product(opt: BatchOptimizer) -> None:
    opt.hvp(torch.ones_like(opt._engine.subject.x))


def value(opt: BatchOptimizer) -> None:
    objective = opt.objective()
    opt_x0 = objective.x0
    assert objective(opt_x0) == pytest.approx(loss(opt.module), rel=1e-6)


CALLS: dict[str, Callable[[BatchOptimizer], object]] = {
    "evaluate": lambda opt: opt.evaluate(),
    "hvp": product,
    "objective": value,
    "load": lambda opt: opt.load(X, Y),
    "step": lambda opt: opt.step(X, Y),
    "steps": lambda opt: list(opt.steps([(X, Y)])),
    "full_gradient": lambda opt: opt.full_gradient([(X, Y)]),
    "parameters": lambda opt: opt.parameters,
    "fingerprint": lambda opt: opt.fingerprint(),
    "state_dict": lambda opt: opt.state_dict(),
    "run_on_workers": lambda opt: opt.run_on_workers(type),
    "calibrate": lambda opt: opt.calibrate(),
}


@pytest.mark.parametrize("workers", WORKERS)
def test_every_call_takes_over_what_was_rebound(workers: int) -> None:
    module = net()
    with build(module, workers) as opt:
        for name, call in CALLS.items():
            opt.load(X, Y)
            opt.evaluate()
            rebind(module)
            expected = parameters_to_vector(module.parameters()).detach().clone()
            call(opt)
            assert torch.equal(opt._engine.subject.x, expected), name
            assert is_x(opt), name
            opt.load(X, Y)
            assert opt.evaluate().item() == pytest.approx(loss(module), rel=1e-6), name


@pytest.mark.parametrize("workers", WORKERS)
def test_other_ways_of_rebinding_are_taken_over(workers: int) -> None:
    module = net()
    first, last = module[0], module[2]
    with build(module, workers) as opt:
        opt.load(X, Y)
        vector = torch.linspace(-1, 1, opt.parameters.numel())
        vector_to_parameters(vector, module.parameters())
        assert opt.evaluate().item() == pytest.approx(loss(module), rel=1e-6)
        assert torch.equal(opt.parameters, vector)
        first.weight.data = first.weight.data.t().contiguous().t()  # the same values, in columns
        assert is_x(opt)
        module.share_memory()  # moves storages without telling their tensors
        with torch.no_grad():
            last.bias.add_(1)
        assert opt.evaluate().item() == pytest.approx(loss(module), rel=1e-6)
        assert is_x(opt)


def of_the_first_three(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (module[:3](inputs) - targets).square().mean()
    return found


class Rebinding(torch.optim.Optimizer):
    """Gradient descent that gives parameters other memory; fails after `fails` steps."""

    def __init__(self, params: Any, fails: bool = False) -> None:
        self.fails = fails
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        found = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad
        if self.fails:
            raise ArithmeticError("the optimizer's")
        return found


@pytest.mark.parametrize("workers", WORKERS)
def test_a_failed_step_restores_what_was_rebound_before_and_in_it(workers: int) -> None:
    module = net()
    with build(module, workers, optimizer=lambda params: Rebinding(params, fails=True)) as opt:
        rebind(module)
        before = parameters_to_vector(module.parameters()).detach().clone()
        with pytest.raises(ArithmeticError):
            opt.step(X, Y)
        assert torch.equal(parameters_to_vector(module.parameters()), before)
        assert is_x(opt)


# ---- what cannot be taken over


def tied() -> Any:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(3, 3))
    module[3].weight = module[0].weight  # used by nothing: which terms f has does not matter here
    return module


def other_shape(module: Any) -> None:
    module[2].weight.data = torch.zeros(9, 6)


def replaced(module: Any) -> None:
    module[0].bias = nn.Parameter(torch.zeros(3))


def assigned(module: Any) -> None:
    module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)


def over_another(module: Any) -> None:
    module[0].bias.data = module[3].bias.data


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "shape": (other_shape, r"'2\.weight' was \(2, 3\) torch\.float32 on cpu .* is now \(9, 6\) torch\.float32 on cpu"),
    "dtype": (
        lambda module: module.double(),
        r"'0\.weight' was \(3, 3\) torch\.float32 .* is now \(3, 3\) torch\.float64 .*: give it values",
    ),
    "device": (lambda module: module.to("meta"), r"'0\.weight' was replaced.*module\.to"),
    "replaced": (replaced, r"'0\.bias' was replaced, .*keep the Parameter .*load_state_dict without assign"),
    "assigned": (assigned, r"'0\.weight' was replaced"),
    "over another": (over_another, r"'0\.bias' .*'3\.bias'|'3\.bias' .*'0\.bias'"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_over_is_an_error_of_every_call(change: Callable[[Any], object], message: str) -> None:
    for call in CALLS.values():
        module = tied()
        with loaded(module, None, X, Y, loss_fn=of_the_first_three) as opt:
            change(module)
            with pytest.raises(BatchoptError, match=message):
                call(opt)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_tensor_that_views_the_old_memory_is_not_written(workers: int) -> None:
    """As it is kept by those who put averaged parameters in for a while."""
    module = net()
    first = module[0]
    with build(module, workers) as opt:
        opt.load(X, Y)
        backup = first.weight.data
        before = backup.clone()
        first.weight.data = torch.zeros(4, 3)
        with pytest.raises(BatchoptError, match=r"'0\.weight' was given other memory .* still .*clone"):
            opt.evaluate()
        assert torch.equal(backup, before)
        assert not first.weight.any()
        first.weight.data = backup  # back in its place
        assert opt.evaluate().item() == pytest.approx(loss(module), rel=1e-6)


def test_a_step_in_which_x_is_moved_itself_leaves_its_values_as_they_were() -> None:
    class Moves(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            super().step()
            opt.parameters.share_memory_()  # type: ignore[no-untyped-call]
            return closure()

    module = net()
    with build(module, optimizer=lambda params: Moves(params, lr=1.0)) as opt:
        before = opt.parameters.clone()
        with pytest.raises(BatchoptError, match=r"`parameters` was given other memory"):
            opt.step(X, Y)
        assert opt.batch_counter == opt.eval_counter == 0
        assert torch.equal(torch.cat([p.detach().flatten() for p in module.parameters()]), before)
