"""What people did with `nn.BatchOptimization` and `parallel` of Torch7; docs/coming-from.md has the rows."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import batchopt
from batchopt import Batches, BatchOptimizer, Sample, Worker
from batchopt.backends.nodes.placing import Room, spread
from batchopt.ignite import fit
from tests.building import on
from tests.workloads import Mlp, cnn, mlp

each_number = pytest.mark.parametrize("parallelize", [1, 2])


@each_number
def test_a_posthook_fills_a_confusion_matrix_of_all_samples(parallelize: int) -> None:
    case = cnn()

    def counted(worker: Worker, sample: Sample) -> torch.Tensor:
        return torch.bincount(10 * sample.targets + sample.output.argmax(1), minlength=100).reshape(10, 10)

    expected = torch.zeros(10, 10, dtype=torch.long)
    for label, found in zip(case.targets, case.module(case.inputs).argmax(1), strict=True):
        expected[label, found] += 1
    with on(case, parallelize=parallelize, posthook=counted) as opt:
        opt.evaluate()
        assert torch.equal(sum(opt.hook_results), expected)


def test_workers_are_known_by_rank_and_process_and_take_functions_with_what_they_capture() -> None:
    captured = {"scale": 10}
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), parallelize=2) as opt:
        pids = [worker.pid for worker in opt.workers]
        assert [(worker.rank, worker.alive, worker.restarts) for worker in opt.workers] == [(0, True, 0), (1, True, 0)]
        assert opt.run_on_workers(lambda worker: (os.getpid(), captured["scale"] * worker.rank)) == [
            (pids[0], 0),
            (pids[1], 10),
        ]


def test_sixteen_workers_on_machines_of_8_16_and_4_cores() -> None:
    assert spread(16, [Room("a", 8), Room("b", 16), Room("c", 4)]) == [("a", 5), ("b", 9), ("c", 2)]


@each_number
def test_a_batch_grows_where_the_gradients_of_its_samples_disagree(parallelize: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    x = torch.randn(256, 3).double()
    y = x.sum(1, keepdim=True) + torch.randn(256, 1).double()

    def moments(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        losses = nn.functional.mse_loss(module(inputs), targets, reduction="none")
        each = [torch.autograd.grad(loss, list(module.parameters()), retain_graph=True) for loss in losses.flatten()]
        rows = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])
        return {"count": len(rows), "sum": rows.sum(0), "square": rows.square().sum(0)}

    with BatchOptimizer(
        net, nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), parallelize=parallelize
    ) as opt:
        size, sizes = 4, []
        for _ in range(20):
            opt.step(x[:size], y[:size])
            found = opt.total(moments, grad=True)
            mean = found["sum"] / found["count"]
            deviation = ((found["square"] / found["count"] - mean.square()).sum() / found["count"]).sqrt()
            size = min(2 * size, 256) if deviation > mean.norm() else size
            sizes.append(size)
        torch.testing.assert_close(mean, opt.full_gradient([(x[: sizes[-2]], y[: sizes[-2]])])[1])
    assert sizes == sorted(sizes) and sizes[0] < 16 < sizes[-1]


@each_number
def test_a_module_in_front_is_applied_and_not_trained(parallelize: int) -> None:
    torch.manual_seed(0)
    front = nn.Linear(6, 6).requires_grad_(False)
    net = nn.Sequential(front, Mlp()).double()
    case = mlp()
    before = copy.deepcopy(front.state_dict())
    with BatchOptimizer(net, case.criterion, optimizer="sgd", parallelize=parallelize) as opt:
        opt.step(case.inputs, case.targets)
        assert len(opt.parameters) == sum(p.numel() for p in net[1].parameters())
        torch.testing.assert_close(opt.predict(case.inputs), net[1](front(case.inputs)).detach())
    assert all(torch.equal(front.state_dict()[name], value) for name, value in before.items())


def test_classes_are_balanced_by_a_sampler() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    weights = (1 / torch.bincount(labels))[labels]
    sampler = WeightedRandomSampler(weights.tolist(), 400, generator=torch.Generator().manual_seed(0))
    seen = []
    with BatchOptimizer(nn.Linear(2, 2), nn.CrossEntropyLoss(), optimizer="sgd") as opt:
        for batch in opt.prepared(DataLoader(TensorDataset(torch.randn(100, 2), labels), 100, sampler=sampler)):
            opt.step(batch)
            seen.append(opt.collect(lambda module, inputs, targets: targets))
    assert abs(torch.cat(seen).double().mean() - 0.5) < 0.1


def test_the_error_of_an_epoch_is_the_mean_over_its_samples() -> None:
    case = mlp()
    with BatchOptimizer(case.module, case.criterion, optimizer=None) as opt:
        state = fit(opt, Batches((case.inputs, case.targets), 10), epochs=1)  # 10, 10, 10 and 7 samples
    assert state.metrics["loss"] == pytest.approx(case.reference()[0], rel=1e-12)


@each_number
def test_two_optimizers_with_a_history_take_turns(parallelize: int) -> None:
    def run(turns: list[int]) -> list[str]:
        one, other = mlp(), mlp(samples=23)
        options: dict[str, Any] = {"optimizer": partial(batchopt.LBFGS, max_iter=3), "chunk_size": 5}
        with (
            on(one, parallelize=parallelize, **options) as first,
            on(other, parallelize=parallelize, **options) as second,
        ):
            for turn in turns:
                case, opt = ((one, first), (other, second))[turn]
                opt.step(case.inputs, case.targets)
            return [first.fingerprint(), second.fingerprint()]

    assert run([0, 0, 0, 1, 1, 1]) == run([0, 1, 0, 1, 1, 0])


@pytest.mark.parametrize("kind", [batchopt.LBFGS, batchopt.CG, batchopt.SSBroyden])
def test_a_step_starts_where_the_user_has_put_the_parameters_and_ends_at_the_loss_it_returns(kind: Any) -> None:
    case = mlp()
    elsewhere = copy.deepcopy(case.module.state_dict())
    with BatchOptimizer(case.module, case.criterion, optimizer=lambda p: kind(p, max_iter=10)) as opt:
        opt.step(case.inputs, case.targets)
        case.module.load_state_dict({key: value * 1.5 for key, value in elsewhere.items()})
        start, losses = case.reference()[0], []

        def closure() -> torch.Tensor:
            losses.append(opt.evaluate())
            return losses[-1]

        opt.load(case.inputs, case.targets)
        opt.optimizer.step(closure)  # type: ignore[union-attr, arg-type]
        assert losses[0].item() == pytest.approx(start, rel=1e-12)
        left = opt.step(case.inputs, case.targets)
        assert left < start and left == pytest.approx(case.reference()[0], rel=1e-12)
