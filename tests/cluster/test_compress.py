"""Compressed gradients on two nodes: bits, bytes, failures, checkpoints."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster
from torch import nn

from batchopt import BatchOptimizer, NonFiniteError, Sample, Worker
from batchopt.doctor import Diagnosis
from tests.cluster.test_ray import Disturbance, Traffic, host_of
from tests.workloads import mlp

pytestmark = pytest.mark.timeout(180)
TWO_BIT = {"type": "2bit", "threshold": 0.05}


def optimizer_of(parallelize: int, compress: Any = TWO_BIT, **options: Any) -> tuple[BatchOptimizer, Any]:
    """SGD with momentum on 24 chunks, in which random numbers are drawn; and its data."""
    case = mlp(samples=96)
    torch.manual_seed(1)
    module = nn.Sequential(case.module, nn.Dropout(0.2), nn.Linear(4, 4).double())
    given = {"backend": "ray", "chunk_size": 4, **options}
    opt = BatchOptimizer(
        module,
        case.criterion,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
        parallelize=parallelize,
        compress=compress,
        **given,
    )
    return opt, (case.inputs, case.targets)


def steps(parallelize: int, compress: Any = TWO_BIT, count: int = 4, **options: Any) -> str:
    """The fingerprint of some steps."""
    opt, data = optimizer_of(parallelize, compress, **options)
    with opt:
        for _ in range(count):
            opt.step(*data)
        return opt.fingerprint()


# ---- bits


def test_the_same_bits_on_one_node_and_on_two(two_nodes: Cluster) -> None:
    assert steps(1) == steps(2)


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["fp16", "bf16", TWO_BIT])
def test_the_same_bits_for_any_number_of_workers(two_nodes: Cluster, compress: Any) -> None:
    found = {steps(parallelize, compress) for parallelize in (1, 2, 3)}
    assert len(found) == 1 and found != {steps(2, None)}


@pytest.mark.slow
def test_workers_come_and_go(two_nodes: Cluster) -> None:
    opt, data = optimizer_of(3)
    with opt:
        for parallelize in (3, 1, 2, 4):
            opt.resize(parallelize)
            opt.step(*data)
        assert opt.fingerprint() == steps(1)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_mid_step(two_nodes: Cluster, tmp_path: Path) -> None:
    with Disturbance(tmp_path, 20, lambda pid: os.kill(pid, signal.SIGKILL)) as disturbance:
        assert steps(3, prehook=disturbance.hook) == steps(1)
    assert (tmp_path / "done").exists()


@pytest.mark.slow
def test_what_a_node_that_is_lost_had_left_is_told(two_nodes: Cluster) -> None:
    opt, data = optimizer_of(4, max_restarts=8)
    with opt:
        opt.step(*data)
        host_of(opt.workers[0].pid).kill()
        with pytest.warns(RuntimeWarning, match="a node was lost with what compression had left of"):
            for _ in range(3):
                loss = opt.step(*data)
        assert loss < 2.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step(*data)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_a_checkpoint_has_what_was_left(two_nodes: Cluster, tmp_path: Path, before: int, after: int) -> None:
    opt, data = optimizer_of(before)
    with opt:
        for _ in range(2):
            opt.step(*data)
        opt.save(tmp_path / "run")
    opt, data = optimizer_of(after)
    with opt:
        opt.load_checkpoint(tmp_path / "run")
        for _ in range(2):
            opt.step(*data)
        assert opt.fingerprint() == steps(2)


@pytest.mark.slow
def test_a_step_that_fails_leaves_what_was_left(two_nodes: Cluster) -> None:
    opt, data = optimizer_of(2)

    def fail() -> None:
        for _ in range(2):
            BatchOptimizer.evaluate(opt)
        raise KeyboardInterrupt

    with opt:
        opt.step(*data)
        opt.step(*data)
        optimize, opt.optimize = opt.optimize, fail  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            opt.step(*data)
        opt.optimize = optimize  # type: ignore[method-assign]
        assert isinstance(opt.check(*data), Diagnosis)  # which leaves no trace either
        opt.step(*data)
        opt.step(*data)
        assert opt.fingerprint() == steps(1)


# ---- bytes


@pytest.mark.slow
def test_the_bytes_that_come_back(two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(compress: Any, chunk_size: int | None, speeds: list[float]) -> float:
        """How many times X's bytes come back in an evaluation."""
        torch.manual_seed(0)
        module = nn.Linear(2000, 20)
        x, y = torch.randn(64, 2000), torch.randn(64, 20)
        with (
            monkeypatch.context() as patch,
            BatchOptimizer(
                module,
                nn.MSELoss(),
                optimizer=None,
                backend="ray",
                parallelize=8,  # all that there is room for: four on each node
                chunk_size=chunk_size,
                speeds=speeds,
                compress=compress,
            ) as opt,
        ):
            opt.load(x, y)
            opt.evaluate()
            traffic, found = Traffic(patch), []
            for _ in range(4):  # where a node is late, which a busy machine makes it, pieces of cells come
                traffic.received = 0
                opt.evaluate()
                found.append(traffic.received)
            return min(found) / opt.parameters.nbytes

    two_bit = {"type": "2bit", "threshold": 0.01}
    for chunk_size, speeds in ((4, [2.0, *[1.0] * 7]), (None, [1.0] * 8)):
        assert 2 <= measure(None, chunk_size, speeds) < 5.1  # several where the parts are no whole subtrees
        assert measure("fp16", chunk_size, speeds) < 2 / 2 + 0.1
        assert measure("bf16", chunk_size, speeds) < 2 / 2 + 0.1
        assert measure(two_bit, chunk_size, speeds) < 8 / 16 + 0.1


# ---- use


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, None])
def test_a_regression_comes_as_far_as_without(two_nodes: Cluster, chunk_size: int | None) -> None:
    def fit(compress: Any) -> float:
        torch.manual_seed(0)
        x = torch.randn(256, 10)
        y = x @ torch.linspace(-1, 1, 10).unsqueeze(1) + 0.3
        with BatchOptimizer(
            nn.Linear(10, 1),
            nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            backend="ray",
            parallelize=2,
            chunk_size=chunk_size,
            compress=compress,
        ) as opt:
            for _ in range(150):
                loss = opt.step(x, y)
            return loss

    exact = fit(None)
    assert exact < 1e-4
    assert fit("fp16") == pytest.approx(exact, rel=0.05, abs=1e-6)
    assert fit({"type": "2bit", "threshold": 1.0}) < 1e-2


@pytest.mark.slow
def test_what_is_exact_and_what_is_refused(two_nodes: Cluster) -> None:
    case = mlp(samples=32)
    scale = 1.0

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scale * nn.functional.mse_loss(module(x), y)

    with (
        BatchOptimizer(
            case.module, loss_fn=loss, optimizer="sgd", backend="ray", parallelize=2, chunk_size=4, compress="fp16"
        ) as opt,
        BatchOptimizer(mlp(samples=32).module, loss_fn=loss, optimizer=None, chunk_size=4) as alone,
    ):
        for each in (opt, alone):
            each.load(case.inputs, case.targets)
            each.evaluate()
        assert opt.output == alone.output  # f itself is not rounded
        error = (opt.grad_parameters - alone.grad_parameters).abs().max()
        assert 0 < error < 1e-3 * alone.grad_parameters.abs().max()
        assert torch.equal(opt.predict(), alone.predict())
        points = torch.stack([opt.parameters, 2 * opt.parameters])
        for found, wanted in zip(opt.evaluate_many(points, True), alone.evaluate_many(points, True), strict=True):
            assert torch.equal(found, wanted)
        refused: dict[str, Callable[[], Any]] = {
            "hvp": lambda: opt.hvp(torch.ones_like(opt.parameters)),
            "objective": opt.objective,
            "full_gradient": lambda: opt.full_gradient([(case.inputs, case.targets)]),
        }
        for name, call in refused.items():
            with pytest.raises(ValueError, match=rf"{name}\(\) is exact, .* build another BatchOptimizer without"):
                call()
        before = opt.parameters.clone()
        scale = 1e9
        with pytest.raises(NonFiniteError, match=r"does not fit in fp16, .* in the sum over samples .* are unchanged"):
            opt.step(case.inputs, case.targets)
        scale = float("nan")
        with pytest.raises(NonFiniteError, match="loss is nan in chunk 0"):
            opt.step(case.inputs, case.targets)
        scale = 1.0
        assert torch.equal(opt.parameters, before)
        opt.step(case.inputs, case.targets)


def test_hooks_see_gradients_before_they_are_rounded(two_nodes: Cluster) -> None:
    def note(worker: Worker, sample: Sample) -> float:
        module = worker.module
        assert module is not None
        return max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)

    opt, data = optimizer_of(2, {"type": "2bit", "threshold": 100.0}, posthook=note)
    with opt:
        opt.step(*data)
        assert opt.grad_parameters.abs().max() == 0 and min(opt.hook_results) > 0
