"""Hogwild: workers that step on parameters that all of them write."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import Batches, BatchOptimizer, NonFiniteError, WorkerError, hogwild
from tests.workloads import Mlp, Pairs, once

torch.manual_seed(0)
X = torch.randn(96, 6, dtype=torch.float64)
Y = torch.tanh(X[:, :4] - X[:, 2:])


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """With a state."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def network(kind: type[Mlp] = Mlp) -> Any:
    """The same each time."""
    torch.manual_seed(1)
    return kind().double()


def plain(epochs: int, shuffle: bool) -> tuple[nn.Module, list[float]]:
    """SGD by torch in one process."""
    module, losses = network(), []
    optimizer = momentum([*module.parameters()])
    orders = Batches(torch.arange(len(X)), 10, shuffle=shuffle)
    for _ in range(epochs):
        for indices in orders:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(X[indices]), Y[indices])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return module, losses


@pytest.mark.rows
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_one_worker_is_plain_sgd_bit_for_bit(shuffle: bool, backend: str) -> None:
    expected, losses = plain(3, shuffle)
    module = network()
    given: dict[str, Any] = {"batch_size": 10, "epochs": 3, "shuffle": shuffle}
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, backend=backend, threads_per_worker=1) as opt:
        found = hogwild(opt, (X, Y), momentum, **given)
    assert found.losses == [losses]
    assert all(map(torch.equal, module.parameters(), expected.parameters()))


@pytest.mark.slow
def test_several_workers_write_the_same_parameters_and_get_somewhere() -> None:
    module = network()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        before = nn.functional.mse_loss(module(X), Y).item()
        found = hogwild(opt, Pairs(X, Y), momentum, batch_size=8, epochs=20)
        after = nn.functional.mse_loss(module(X), Y).item()
        assert after < before / 3
        assert sum(map(len, found.losses)) == 20 * 12
        assert max(losses[0] for losses in found.losses if losses) > after
        opt.load(X, Y)
        assert opt.evaluate().item() == pytest.approx(after)


def test_parameters_are_read_only_again_afterwards() -> None:
    def write(worker: Any) -> None:
        with torch.no_grad():
            next(worker.module.parameters()).zero_()

    with BatchOptimizer(network(), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        hogwild(opt, (X, Y), momentum, batch_size=10)
        before = opt.parameters.clone()
        with pytest.raises(Exception, match="SIGSEGV"):
            opt.run_on_workers(write)
        assert torch.equal(opt.parameters, before)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    def die(part: nn.Module, inputs: Any) -> None:
        if (tmp_path / "armed").exists() and once(tmp_path / "done"):
            os.kill(os.getpid(), signal.SIGKILL)

    module = network()
    module.get_submodule("first").register_forward_pre_hook(die)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        before = nn.functional.mse_loss(module(X), Y).item()
        (tmp_path / "armed").touch()
        found = hogwild(opt, (X, Y), momentum, batch_size=8, epochs=10)
        (tmp_path / "armed").unlink()
        assert (tmp_path / "done").exists() and sum(worker.restarts for worker in opt.workers) == 1
        assert sum(map(len, found.losses)) == 120
        assert nn.functional.mse_loss(module(X), Y).item() < before / 2


@pytest.mark.slow
@pytest.mark.parametrize("failing", [False, True])
def test_who_is_late_has_stopped_writing_when_it_ends(failing: bool, tmp_path: Path) -> None:
    """Nobody steps on mini-batches that another worker is at, and no step is made after the call."""
    steps = tmp_path / "steps"
    others = 2 if failing else 20 * 12 - 7  # all are made by then but for the rest of the first chunk

    def dawdle(part: nn.Module, inputs: Any) -> None:
        with steps.open("ab") as file:
            file.write(b".")
        if once(tmp_path / "late"):
            while steps.stat().st_size < others:
                time.sleep(0.01)
            time.sleep(0.3)  # so that somebody who does not wait is seen
            (tmp_path / "done").touch()
        elif failing and not (tmp_path / "done").exists():
            raise ZeroDivisionError("while another one steps")

    module = network()
    module.get_submodule("first").register_forward_pre_hook(dawdle)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        if failing:
            with pytest.raises(WorkerError, match="while another one steps"):
                hogwild(opt, (X, Y), momentum, batch_size=8, epochs=20)
        else:
            hogwild(opt, (X, Y), momentum, batch_size=8, epochs=20)
            assert steps.stat().st_size == 20 * 12
        assert (tmp_path / "done").exists()
        after = opt.parameters.clone()
        opt.run_on_workers(lambda worker: None)
        assert torch.equal(opt.parameters, after)


def test_running_statistics_are_refused_unless_they_stay() -> None:
    norm = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    with BatchOptimizer(norm, nn.MSELoss(), optimizer=None) as opt:
        with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) keeps running statistics"):
            hogwild(opt, (X, Y), momentum, batch_size=8)
        norm.eval()
        hogwild(opt, (X, Y), momentum, batch_size=8)


@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("of_gradient", [False, True])
def test_no_step_is_made_on_what_is_not_finite(of_gradient: bool, parallelize: int) -> None:
    x, y = X.clone(), Y.clone()
    x[40] = 0.0

    def loss_fn(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        own = (x * next(module.parameters()).sum()).norm(dim=1) if of_gradient else 1 / x.norm(dim=1)
        bad = torch.where(own == 0, own.sqrt(), 0) if of_gradient else own
        loss: torch.Tensor = (module(x) - y).square().mean() + bad.mean()
        return loss

    module = network()
    with BatchOptimizer(module, loss_fn=loss_fn, optimizer=None, parallelize=parallelize) as opt:
        with pytest.raises(NonFiniteError, match=r"in the mini-batch of samples \[40, 41, 42, 43\]"):
            hogwild(opt, (x, y), momentum, batch_size=4, shuffle=False)
        assert bool(opt.parameters.isfinite().all())
