"""What requires grad and is not in X would never be trained: it is refused by name, before a process starts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term

NOISE = nn.Parameter(torch.zeros(()))
WORKERS = pytest.mark.parametrize("parallelize", [1, 2])


class Likelihood(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(1))


@WORKERS
def test_parameters_that_a_loss_function_captures(parallelize: int) -> None:
    likelihood = Likelihood()

    def loss_fn(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = (module(x) * likelihood.noise.exp()).mean()
        return value

    with pytest.raises(ValueError, match=r"'loss_fn\.likelihood\.noise' is a parameter of shape \(1,\)"):
        BatchOptimizer(nn.Linear(2, 1), loss_fn=loss_fn, parallelize=parallelize)
    both = nn.ModuleDict({"net": nn.Linear(2, 1), "likelihood": likelihood})
    together: Any = lambda m, x, y: (m["net"](x) * m["likelihood"].noise.exp()).mean()  # noqa: E731
    BatchOptimizer(both, loss_fn=together).close()


@WORKERS
def test_variables_that_are_plain_tensors(parallelize: int) -> None:
    variable = torch.tensor(1.0, requires_grad=True)
    loss_fn: Any = partial(lambda scale, m, x, y: (m(x) * scale).square().mean(), variable)
    with pytest.raises(ValueError, match=r"'loss_fn\.args\[0\]' is a tensor of shape \(\) that requires grad"):
        BatchOptimizer(nn.Linear(2, 1), loss_fn=loss_fn, parallelize=parallelize)
    computed: Any = partial(lambda scale, m, x, y: (m(x) * scale).square().mean(), variable.exp())
    with pytest.raises(ValueError, match="requires grad"):
        BatchOptimizer(nn.Linear(2, 1), loss_fn=computed, parallelize=parallelize)
    variable.requires_grad_(False)
    with BatchOptimizer(nn.Linear(2, 1), loss_fn=loss_fn, parallelize=parallelize, optimizer=None) as opt:
        opt.load(torch.ones(4, 2))
        opt.evaluate()


@WORKERS
def test_learned_weights_of_terms(parallelize: int) -> None:
    weight = nn.Parameter(torch.ones(()))
    terms = {"one": Term(lambda m, x, y: m(x).mean()), "two": Term(lambda m, x, y: m(x).mean() * weight)}
    with pytest.raises(ValueError, match=r"'loss_fn\[1\]\.weight'"):
        BatchOptimizer(nn.Linear(2, 1), terms=terms, parallelize=parallelize)


@WORKERS
def test_a_module_in_a_list_that_torch_does_not_see(parallelize: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.others = nn.Linear(2, 2), [nn.Linear(2, 2)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.others[0](self.first(x))
            return y

    module = Net()
    with pytest.raises(ValueError, match=r"'module\.others\[0\]\.(weight|bias)' is a parameter"):
        BatchOptimizer(module, nn.MSELoss(), parallelize=parallelize)
    module.others[0].requires_grad_(False)
    BatchOptimizer(module, nn.MSELoss(), parallelize=parallelize).close()


def test_a_global_of_a_criterion() -> None:
    with pytest.raises(ValueError, match=r"'criterion\.NOISE'"):
        BatchOptimizer(nn.Linear(2, 1), eval("lambda y, t: y.mean() * NOISE", {"NOISE": NOISE}))


def test_what_a_module_has_seen_and_what_its_own_hooks_have_are_no_parameters() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.points = x.detach().requires_grad_()
            y: torch.Tensor = self.linear(self.points)
            self.seen = [y]
            return y

    module = Remembers()
    module(torch.ones(3, 2))
    BatchOptimizer(module, nn.MSELoss(), posthook=lambda worker, sample: NOISE).close()
