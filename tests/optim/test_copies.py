"""Optimizers are copied and pickled as torch's are: the copy moves parameters of its own, and goes on as the first
would."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import batchopt

X, Y = torch.linspace(-1, 1, 12).view(6, 2).double(), torch.linspace(0, 1, 6).view(6, 1).double()
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
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
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_by_itself(kind: str, duplicate: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(2, 1).double()
    optimizer = KINDS[kind](list(module.parameters()))
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


@pytest.mark.parametrize("kind", [batchopt.LBFGS, batchopt.CG, batchopt.SSBroyden])
def test_a_learning_rate_may_be_a_tensor(kind: Any) -> None:
    modules = [nn.Linear(2, 1).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    found = []
    for module, lr in zip(modules, (0.01, torch.tensor(0.01, dtype=torch.float64)), strict=True):
        found.append(step(module, kind(module.parameters(), lr=lr, max_iter=2)))
    assert found[0] == found[1] and torch.equal(modules[0].weight, modules[1].weight)
    with pytest.raises(TypeError, match="`lr` must be a number"):
        kind(modules[0].parameters(), lr=torch.ones(2))
    with pytest.raises(ValueError, match="`lr` must be positive"):
        kind(modules[0].parameters(), lr=torch.tensor(-1.0))
