"""What people did with Chainer's updaters and trainer; docs/coming-from.md has the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from batchopt import BatchOptimizer
from batchopt.ignite import create_trainer, fit
from tests.building import loaded, on
from tests.ignite.common import batches, optimizer
from tests.workloads import mlp

each_number = pytest.mark.parametrize("parallelize", [1, 2])


class TwoInputs(nn.Module):
    """Is called with two arguments, and is its own loss if there are three."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.net(torch.cat([a, b], 1))
        return found if y is None else nn.functional.mse_loss(found, y)


def positional(module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    return nn.functional.mse_loss(module(*inputs), targets)


def by_name(module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    return nn.functional.mse_loss(module(**inputs), targets)


def own(module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    found: torch.Tensor = module(*inputs, targets)
    return found


@pytest.mark.sampled
@each_number
@pytest.mark.parametrize("call", [positional, by_name, own])
def test_a_batch_is_unpacked_as_the_module_wants_it(call: Any, parallelize: int) -> None:
    case = mlp()
    module = TwoInputs(case.module)
    a, b = case.inputs[:, :2], case.inputs[:, 2:]
    with loaded(
        module,
        None,
        {"a": a, "b": b} if call is by_name else (a, b),
        case.targets,
        loss_fn=call,
        parallelize=parallelize,
    ) as opt:
        assert opt.evaluate().item() == pytest.approx(case.reference()[0], rel=1e-12)


@each_number
def test_a_loss_that_is_scaled_and_gradients_that_are_divided_again(parallelize: int) -> None:
    case = mlp()
    with on(case, parallelize=parallelize) as opt:
        opt.evaluate()
        expected = opt.grad_parameters.clone()
        case.module.zero_grad()
        (opt.loss() * 1024).backward()  # type: ignore[no-untyped-call]
        found = torch.cat([p.grad.flatten() for p in case.module.parameters() if p.grad is not None])
        torch.testing.assert_close(found / 1024, expected)


@each_number
@pytest.mark.parametrize("samples", [13, 1])
@pytest.mark.filterwarnings("ignore:.*idle:UserWarning")
def test_a_step_is_that_of_one_process_and_hyperparameters_stay(samples: int, parallelize: int) -> None:
    alone, case = mlp(samples=samples), mlp(samples=samples)
    sgd = torch.optim.SGD(alone.module.parameters(), lr=0.5, momentum=0.9)
    with BatchOptimizer(
        case.module,
        case.criterion,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        parallelize=parallelize,
    ) as opt:
        for _ in range(3):
            sgd.zero_grad()
            alone.criterion(alone.module(alone.inputs), alone.targets).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            opt.step(case.inputs, case.targets)
        torch.testing.assert_close(opt.parameters, nn.utils.parameters_to_vector(alone.module.parameters()))
        assert opt.optimizer is not None and opt.optimizer.param_groups[0]["lr"] == 0.5


def test_a_training_is_run_again_for_more_epochs() -> None:
    with optimizer() as whole, optimizer() as again:
        fit(whole, batches(), epochs=3)
        position = batches()
        fit(again, position, epochs=1)
        fit(again, position, epochs=3)
        assert again.fingerprint() == whole.fingerprint() and position.iteration == 15


def test_triggers_by_a_list_and_once() -> None:
    seen: list[tuple[str, int]] = []
    with optimizer() as opt:
        trainer = create_trainer(opt)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=[2, 7]), lambda: seen.append(("listed", trainer.state.iteration))
        )
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: seen.append(("once", trainer.state.epoch)))
        trainer.run(batches(), max_epochs=2)
    assert seen == [("listed", 2), ("once", 1), ("listed", 7)]


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
