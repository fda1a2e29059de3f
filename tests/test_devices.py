"""Workers that compute on another device than this machine's memory.

"cpu:0" stands in for one where there is none: to a worker it is another device, with copies of everything.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Term, Worker, WorkerError
from tests.building import loaded, on
from tests.card.recorded import Recorded
from tests.workloads import Workload, burgers, cnn, logistic, misfit, mlp, rnn

DEVICES = pytest.mark.parametrize(
    "devices",
    [
        pytest.param(["cpu:0", "cpu"], id="stand-in"),
        pytest.param(
            ["cuda:0", "cpu"],
            id="cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
            ],
        ),
    ],
)


@pytest.mark.rows
@DEVICES
@pytest.mark.parametrize("case", [mlp, cnn, rnn, burgers, logistic], ids=lambda case: case.__name__)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_f_and_its_gradient_are_those_of_one_process(
    case: Callable[[], Workload], devices: list[str], chunk_size: int | None
) -> None:
    work = case()
    loss, gradient = work.reference()
    with on(work, devices=devices, chunk_size=chunk_size) as opt:
        for _ in range(2):
            assert opt.evaluate().item() == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-10, atol=1e-12)
        assert [str(worker.device) for worker in opt.workers] == devices


class Net(nn.Module):
    """Running statistics, a frozen parameter that is registered twice, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        self.layer = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.again = self.frozen
        self.register_buffer("constant", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.again is self.frozen
        output: torch.Tensor = self.layer(self.norm(x) * self.frozen * self.constant)
        return output


@DEVICES
def test_constants_and_statistics_are_the_modules(devices: list[str]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(24, 3).double(), torch.randn(24, 1).double()

    def run(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        net = Net().double()
        with BatchOptimizer(net, nn.MSELoss(), optimizer="sgd", chunk_size=8, **options) as opt:
            losses = [opt.step(x, y)]
            with torch.no_grad():
                net.frozen.fill_(3.0)
                net.get_buffer("constant").data.fill_(0.5)
            losses.append(opt.step(x, y))
            net.eval()
            losses.append(opt.step(x, y))
        return losses, net.state_dict()

    with pytest.warns(UserWarning, match="BatchNorm1d"):
        losses, state = run(devices=devices)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        expected, expected_state = run()
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected_state[name], rtol=1e-12, atol=1e-12)


@DEVICES
def test_a_worker_that_is_killed_is_replaced_on_its_device(devices: list[str]) -> None:
    work = mlp()
    loss, _ = work.reference()
    with on(work, devices=devices, chunk_size=4) as opt:
        opt.evaluate()
        os.kill(opt.workers[0].pid, signal.SIGKILL)
        assert opt.evaluate().item() == pytest.approx(loss, rel=1e-12)
        while not opt.workers[0].restarts:  # its death may be heard after another one has done its chunk
            opt.evaluate()
        assert opt.run_on_workers(lambda worker: str(worker.device)) == devices
        assert opt.workers[0].restarts == 1
        with pytest.raises(ValueError, match="build a new BatchOptimizer"):
            opt.resize(4)


def test_pieces_that_are_kept_there_are_those_of_their_term() -> None:
    """Though others have the same positions."""
    work = mlp()
    f = misfit(work.module, work.inputs, work.targets) + 0.5 * misfit(work.module, -2 * work.inputs, work.targets)
    terms, data = {"a": Term(misfit), "b": Term(misfit, 0.5)}, (work.inputs, work.targets)
    given: dict[str, Any] = {"terms": terms, "devices": ["cpu:0", "cpu:0"], "speeds": [1, 0], "chunk_size": 9}
    with loaded(work.module, None, {"a": data, "b": (-2 * work.inputs, work.targets)}, **given) as opt:
        for _ in range(2):
            assert opt.evaluate().item() == pytest.approx(f.item(), rel=1e-12)


def test_a_batch_on_another_device_than_the_module_says_what_to_do() -> None:
    module = nn.Linear(3, 1)
    with BatchOptimizer(module, nn.MSELoss()) as opt:
        opt.load(torch.ones(4, 3, device="meta"), torch.ones(4, 1))
        with pytest.raises(
            WorkerError, match=r"batch is on another device than the module, move it there: inputs\.to\(device\)"
        ):
            opt.evaluate()


def record(worker: Worker) -> None:
    """Have evaluations on the stand-in recorded."""
    vars(sys.modules["batchopt_workers.shortcuts.recording"])["RECORDINGS"]["cpu"] = Recorded


def replays(worker: Worker) -> int:
    return sum(recording.replays for recording in Recorded.made)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("case", [mlp, cnn, burgers], ids=lambda case: case.__name__)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_workers_on_devices_record_what_repeats(case: Callable[[], Workload], chunk_size: int | None) -> None:
    found = []
    for graph in (True, False):
        options = {"chunk_size": chunk_size, "precode": record, "compile": None if graph else False}
        with on(case(), devices=["cpu:0", "cpu:0"], speeds=[1, 1], **options) as opt:
            values = []
            for _ in range(5):
                values.append((opt.evaluate().item(), opt.grad_parameters.tolist()))
                with torch.no_grad():
                    opt.parameters.mul_(1.01)
            found.append(values)
            if graph:
                assert sum(opt.run_on_workers(replays)) >= 4
    assert found[0] == found[1]
