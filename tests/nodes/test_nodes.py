"""What nodes have beside the contract: bits, what is sent to whom, nodes that are lost and replaced."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from tests.nodes import local
from tests.nodes.disturbance import Disturbance, steps
from tests.workloads import Workload, mlp


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The fingerprint of one process."""
    return steps("serial", 1)


@pytest.fixture
def losses() -> Iterator[None]:
    """Nodes are lost in the test: those that came instead end with it."""
    local.end()
    yield
    local.end()


def optimizer(case: Workload, parallelize: int = 0, **options: Any) -> BatchOptimizer:
    """With so many workers on nodes, or in this process alone."""
    where: dict[str, Any] = {"backend": "local nodes", "parallelize": parallelize} if parallelize else {}
    given = {"optimizer": "sgd", "chunk_size": 4, **where, **options}
    return BatchOptimizer(case.module, case.criterion, **given)


def node_of(pid: int) -> psutil.Process:
    """The node that a worker process belongs to."""
    for parent in psutil.Process(pid).parents():
        if "nodes.node import serve" in " ".join(parent.cmdline()):
            return parent
    raise LookupError


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("lists", [False, True])
def test_a_batch_that_comes_again_is_not_sent_again(monkeypatch: pytest.MonkeyPatch, lists: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 100), torch.randn(200, 1)
    batch = (list(x), list(y)) if lists else (x, y)
    case = Workload(nn.Linear(100, 1), nn.MSELoss(), x, y)
    twin = copy.deepcopy(case)
    with (
        optimizer(case, 4, optimizer=None, chunk_size=8) as opt,
        optimizer(twin, optimizer=None, chunk_size=8) as alone,
    ):
        opt.load(*batch)  # and measure
        traffic = local.Traffic(monkeypatch)
        sent = []
        for again in range(5):
            if again == 3:
                x.numpy()[150] = 7.0  # which no version counter tells
            before = traffic.sent
            for each in (opt, alone):
                each.load(*batch)
                each.evaluate()
            sent.append(traffic.sent - before > x.nbytes / 2)
            assert opt.evaluate().item() == alone.evaluate().item()
            assert torch.equal(opt.grad_parameters, alone.grad_parameters)
        assert sent == [True, False, False, True, False]


@pytest.mark.slow
def test_a_node_is_sent_its_shard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1000, 100), torch.randn(1000, 1)
    traffic = local.Traffic(monkeypatch)
    case = Workload(nn.Linear(100, 1), nn.MSELoss(), x, y)
    with optimizer(case, 4, speeds=[1.0, 1.0, 3.0, 3.0], optimizer=None, chunk_size=None) as opt:
        opt.load(x, y)
        before = traffic.sent
        opt.evaluate()
        assert x.nbytes + y.nbytes < traffic.sent - before < 1.1 * (x.nbytes + y.nbytes)
        before = traffic.sent
        opt.evaluate()
        assert traffic.sent - before < 10_000


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    "machines, numbers", [({"one": 4, "two": 4}, (2, 4, 3, 1)), ({"one": 5}, (3, 2, 1, 3))], ids=["nodes", "one node"]
)
def test_more_and_fewer_workers(
    monkeypatch: pytest.MonkeyPatch, machines: dict[str, int], numbers: tuple[int, ...]
) -> None:
    """A node keeps its room, and those of its workers that it can."""
    monkeypatch.setattr(local.LocalPlacer, "machines", machines)
    case, twin = mlp(samples=96), mlp(samples=96)
    with optimizer(case, numbers[0]) as opt, optimizer(twin) as alone:
        opt.run_on_workers(lambda worker: worker.state.update(old=True))
        for workers in numbers:
            opt.resize(workers)
            assert opt.run_on_workers(lambda worker: worker.rank) == list(range(workers))
            if workers == 4:
                assert opt.run_on_workers(lambda worker: "old" in worker.state) == [True, True, False, False]
            assert opt.step(case.inputs, case.targets) == alone.step(twin.inputs, twin.targets)
            assert [worker.restarts for worker in opt.workers] == [0] * workers
            nodes = {node_of(worker.pid).pid for worker in opt.workers}
            assert workers > 1 or len(nodes) == 1  # a worker there, not this process
        assert alone.fingerprint() == opt.fingerprint()


@pytest.mark.slow
@pytest.mark.usefixtures("losses")
def test_a_lost_node_is_replaced() -> None:
    case = mlp(samples=96)
    with optimizer(case, 4) as opt:
        opt.step(case.inputs, case.targets)
        before = [worker.pid for worker in opt.workers]
        node_of(before[0]).kill()
        opt.step(case.inputs, case.targets)
        deadline = time.monotonic() + 60
        while not all(worker.alive for worker in opt.workers) and time.monotonic() < deadline:
            opt.step(case.inputs, case.targets)
        assert [worker.alive for worker in opt.workers] == [True] * 4
        assert opt.run_on_workers(lambda worker: (worker.rank, os.getpid())) == [(w.rank, w.pid) for w in opt.workers]
        assert sum(worker.pid not in before for worker in opt.workers) == 2
        assert sum(worker.restarts for worker in opt.workers) == 2


@pytest.mark.nightly
@pytest.mark.usefixtures("losses")
def test_a_failure_of_the_users_code_names_the_first_samples(tmp_path: Path) -> None:
    failed = tmp_path / "the first have failed"

    def refuse(worker: Worker, sample: Sample) -> None:
        if sample.indices.start == 0:
            failed.touch()
        until = time.monotonic() + 30
        while not failed.exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3 if sample.indices.start else 0.0)  # that is reported meanwhile
        raise ZeroDivisionError(str(sample.indices.start))

    case = mlp(samples=96)
    with optimizer(case, 4, prehook=refuse) as opt:
        for _ in range(3):
            with pytest.raises(WorkerError, match=r"ZeroDivisionError in worker 0, samples 0\.\.3: 0"):
                opt.step(case.inputs, case.targets)
            failed.unlink()


class Shy:
    """Its copy on a node can be read only if the file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __setstate__(self, state: dict[str, Path]) -> None:
        if not state["file"].exists():
            raise OSError("not yet")
        vars(self).update(state)


@pytest.mark.slow
def test_a_node_that_cannot_take_what_it_is_sent_is_sent_everything_again(tmp_path: Path) -> None:
    case, twin = mlp(samples=96), mlp(samples=96)
    options = [Shy(tmp_path / "there") for _ in range(96)]
    with optimizer(case, 2) as opt, optimizer(twin) as alone:
        opt.step(case.inputs, case.targets)
        alone.step(twin.inputs, twin.targets)
        with pytest.raises(WorkerError, match=r"OSError.*on node|OSError.*not yet"):
            opt.step(case.inputs, case.targets, options)
        (tmp_path / "there").touch()
        opt.step(case.inputs, case.targets, options)
        alone.step(twin.inputs, twin.targets, options)
        assert torch.equal(opt.parameters, alone.parameters)
        assert [worker.restarts for worker in opt.workers] == [0, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible", "losses")
def test_an_interrupt_leaves_it_usable(tmp_path: Path) -> None:
    case, twin = mlp(samples=96), mlp(samples=96)
    main = threading.main_thread().ident
    assert main is not None
    with (
        Disturbance(tmp_path, 20, lambda pid: signal.pthread_kill(main, signal.SIGINT)) as disturbance,
        optimizer(case, 4, prehook=disturbance.hook) as opt,
        optimizer(twin) as alone,
    ):
        before = opt.parameters.clone()
        with pytest.raises(KeyboardInterrupt):
            opt.step(case.inputs, case.targets)
        assert torch.equal(opt.parameters, before)
        opt.step(case.inputs, case.targets)
        alone.step(twin.inputs, twin.targets)
        assert alone.fingerprint() == opt.fingerprint()


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("way", ["a node is killed", "a node is stopped", "a worker is killed"])
def test_a_process_that_ends_or_stops_in_mid_step(undisturbed: str, tmp_path: Path, way: str) -> None:
    def disturb(pid: int) -> None:
        if way == "a worker is killed":
            os.kill(pid, signal.SIGKILL)
        elif way == "a node is killed":
            node_of(pid).kill()
        else:
            node_of(pid).suspend()

    with Disturbance(tmp_path, 20, disturb) as disturbance:
        assert steps("local nodes", 4, prehook=disturbance.hook, timeout=4.0) == undisturbed
    assert (tmp_path / "done").exists()


@pytest.mark.nightly
def test_the_sign_of_zero_reaches_the_nodes() -> None:
    def sign(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = module.get_parameter("weight")
        return (weight * x.sum() + torch.copysign(y, weight)).sum()

    module = nn.Linear(1, 1, bias=False).double()
    with BatchOptimizer(module, loss_fn=sign, backend="local nodes") as opt:
        opt.load(torch.zeros(1, 1).double(), torch.ones(1, 1).double())
        found = []
        for zero in (0.0, -0.0):
            with torch.no_grad():
                module.weight.fill_(zero)
            found.append(opt.evaluate().item())
        assert found == [1.0, -1.0]


@pytest.mark.nightly
def test_a_short_timeout_leaves_time_for_signs_of_life() -> None:
    case = mlp(samples=96)
    with optimizer(case, 2, timeout=0.5, chunk_size=None) as opt:
        opt.step(case.inputs, case.targets)
        threading.Event().wait(2.0)
        opt.step(case.inputs, case.targets)
        assert [worker.restarts for worker in opt.workers] == [0, 0]


@pytest.mark.nightly
def test_an_evaluation_may_take_longer_than_the_timeout() -> None:
    def slow(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(0.1 * float(module.get_parameter("bias").detach() > 0))
        return nn.functional.mse_loss(module(x), y)

    module = nn.Linear(1, 1)
    options: dict[str, Any] = {"optimizer": None, "backend": "local nodes", "parallelize": 1}
    with BatchOptimizer(module, loss_fn=slow, timeout=3.0, chunk_size=1, **options) as opt:
        opt.load(torch.ones(40, 1), torch.ones(40, 1))
        found = []
        for bias in (-1.0, 1.0):  # a short one, and then one of four seconds
            with torch.no_grad():
                module.weight.fill_(1.0)
                module.bias.fill_(bias)
            found.append(opt.evaluate().item())
        assert found == [1.0, 1.0] and [worker.restarts for worker in opt.workers] == [0]
