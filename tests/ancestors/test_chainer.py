"""What people did with Chainer's updaters and trainer; docs/ancestors.md has the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt.training import fit
from tests.building import loaded
from tests.training.common import batches, optimizer
from tests.workloads import mlp


class TwoInputs(nn.Module):
    """Is called with two arguments, and is its own loss if there are three."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.net(torch.cat([a, b], 1))
        return found if y is None else nn.functional.mse_loss(found, y)


CALLS: dict[str, Callable[[nn.Module, Any, Any], torch.Tensor]] = {
    "positional": lambda module, inputs, targets: nn.functional.mse_loss(module(*inputs), targets),
    "by name": lambda module, inputs, targets: nn.functional.mse_loss(module(**inputs), targets),
    "its own loss": lambda module, inputs, targets: module(*inputs, targets),
}


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_batch_is_unpacked_as_the_module_wants_it(call: str, parallelize: int) -> None:
    case = mlp()
    a, b = case.inputs[:, :2], case.inputs[:, 2:]
    inputs = {"a": a, "b": b} if call == "by name" else (a, b)
    with loaded(
        TwoInputs(case.module), None, inputs, case.targets, loss_fn=CALLS[call], parallelize=parallelize
    ) as opt:
        assert opt.evaluate().item() == pytest.approx(case.reference()[0], rel=1e-12)


def test_a_training_is_run_again_for_more_epochs() -> None:
    with optimizer() as whole, optimizer() as again:
        fit(whole, batches(), epochs=3)
        position = batches()
        fit(again, position, epochs=1)
        fit(again, position, epochs=3)
        assert again.fingerprint() == whole.fingerprint() and position.iteration == 15


@pytest.mark.parametrize("name", ["lbfgs", "adam"])
def test_a_module_with_frozen_layers_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    def run(steps: int, first: int = 0) -> str:
        case = mlp()
        case.module.get_submodule("first").requires_grad_(False)
        with BatchOptimizer(case.module, case.criterion, optimizer=name, chunk_size=8) as opt:
            if first:
                opt.load_checkpoint(tmp_path / "state")
            for _ in range(first, steps):
                opt.step(case.inputs, case.targets)
            opt.save(tmp_path / "state")
            return opt.fingerprint()

    run(2)
    resumed = run(4, first=2)
    assert resumed == run(4)
