"""Optimizers of other libraries that need more than one gradient do over workers what they do with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import batchopt
from tests.workloads import Mlp

X, Y = torch.linspace(-1, 1, 120).view(20, 6).double(), torch.linspace(0, 1, 80).view(20, 4).double()


def network() -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return Mlp().double()


class Sam(torch.optim.SGD):
    """Moves twice, by the gradient that it finds and by that of its closure, as the libraries' do."""

    def first_step(self) -> None:
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.data.add_(p.grad, alpha=0.05 / norm.item())
        self.zero_grad()

    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        super().step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


def plain(module: nn.Module, create_graph: bool = False) -> tuple[float, list[torch.Tensor]]:
    """The loss by plain torch; its gradient is left in the parameters, and returned."""
    module.zero_grad()
    loss = nn.functional.mse_loss(module(X), Y)
    gradients = torch.autograd.grad(loss, [*module.parameters()], create_graph=create_graph)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient.detach().clone()
    return loss.item(), [*gradients]


@pytest.mark.slow
@pytest.mark.parametrize("parallelize", [1, 2])
def test_two_moves_in_a_step_are_those_of_plain_torch(parallelize: int) -> None:
    alone = network()
    sam, losses = Sam(alone.parameters(), lr=0.1), []
    for _ in range(4):
        plain(alone)
        sam.step(lambda: losses.append(plain(alone)[0]))
    factory: Callable[[Any], Sam] = lambda params: Sam(params, lr=0.1)  # noqa: E731
    with batchopt.BatchOptimizer(network(), nn.MSELoss(), optimizer=factory, parallelize=parallelize) as opt:
        assert [opt.step(X, Y) for _ in range(4)] == pytest.approx(losses, rel=1e-12)
        assert opt.eval_counter == 8
        for one, two in zip(opt.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
