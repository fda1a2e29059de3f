"""One process and one thread at a time: anything else is told so, and does no harm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Sample, Worker
from batchopt.errors import BatchoptError
from tests.building import Child, handling, loaded

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
# Python 3.12 warns of forks in a process that has threads, as torch's have.
forks_with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


# ---- while a call is at work


X, Y = torch.linspace(-1, 1, 16).view(8, 2), torch.linspace(0, 1, 8).view(8, 1)


@needs_fork
@forks_with_threads
def test_other_threads_and_forked_children_are_told_who_uses_it() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waiting(BatchOptimizer):
        def optimize(self) -> None:
            inside.set()
            assert leave.wait(30)
            super().optimize()

    def told() -> str:
        try:
            opt.load(X, Y)
        except BatchoptError as error:
            return str(error)
        return "nothing"

    with Waiting(nn.Linear(2, 1), nn.MSELoss(), optimizer="sgd") as opt:
        thread = threading.Thread(target=opt.step, args=(X, Y), name="the first")
        thread.start()
        assert inside.wait(30)
        said = told(), Child(told).said()
        leave.set()
        thread.join()
        assert "is running in thread 'the first'" in said[0]
        for one in (said[1], Child(told).said()):
            assert f"belongs to process {os.getpid()}" in one and "this is process CHILD" in one
        assert told() == "nothing" and opt.batch_counter == 1


def signalling(worker: Worker, sample: Sample) -> None:
    """A hook that signals the parent once."""
    if worker.state.pop("parent", 0):
        signal_parent()


def signals(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A function of the batch that does so from its first chunk."""
    if torch.equal(inputs[0], X[0]):
        signal_parent()
    return inputs


def signal_parent() -> None:
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGUSR1)  # that of the process which workers are forked from
    time.sleep(0.5)  # so that the parent waits for this worker when the signal comes


@pytest.fixture
def armed() -> Callable[[BatchOptimizer], object]:
    """Has the second worker signal."""
    return lambda opt: opt.run_on_workers(lambda worker: worker.state.update(parent=worker.rank == 1))


@pytest.mark.rows
@pytest.mark.parametrize(
    "use",
    [
        lambda opt: opt.evaluate(),
        lambda opt: opt.map(),
        lambda opt: opt.step(X, Y),
        lambda opt: opt.load(X, Y),
        lambda opt: opt.run_on_workers(lambda worker: None),
        lambda opt: opt.resize(1),
        lambda opt: setattr(opt, "prehook", None),
    ],
    ids=["evaluate", "map", "step", "load", "run_on_workers", "resize", "prehook"],
)
def test_a_signal_handler_cannot_use_what_waits_for_workers(
    use: Callable[[BatchOptimizer], object], armed: Callable[[BatchOptimizer], object]
) -> None:
    said: list[str] = []
    module = nn.Linear(2, 1)
    expected = nn.MSELoss()(module(X), Y).item()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2, prehook=signalling) as opt:

        def handler() -> None:
            try:
                use(opt)
            except BatchoptError as error:
                said.append(str(error))

        armed(opt)
        opt.load(X, Y)
        with handling(handler):
            assert opt.evaluate().item() == pytest.approx(expected)
        assert len(said) == 1 and "is in the middle of evaluate()" in said[0]
        assert opt.evaluate().item() == pytest.approx(expected)
        assert opt.eval_counter == 2


@pytest.mark.rows
@pytest.mark.parametrize(
    "call",
    [lambda opt: opt.evaluate(), lambda opt: opt.step(X, Y), lambda opt: opt.collect(signals, X, Y)],
    ids=["evaluate", "step", "collect"],
)
def test_a_signal_handler_that_closes_ends_the_call(
    call: Callable[[BatchOptimizer], object], armed: Callable[[BatchOptimizer], object]
) -> None:
    opt = BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer="sgd", parallelize=2, prehook=signalling)
    armed(opt)
    opt.load(X, Y)
    before, everyone = opt.parameters.clone(), [psutil.Process(worker.pid) for worker in opt.workers]
    with handling(opt.close), pytest.raises(BatchoptError, match="was closed"):
        call(opt)
    _, left = psutil.wait_procs(everyone, timeout=10)
    assert not left
    assert torch.equal(torch.cat([p.detach().flatten() for p in opt.module.parameters()]), before)
    for use in (opt.evaluate, lambda: opt.predict(X)):
        with pytest.raises(BatchoptError, match="was closed"):
            use()


@pytest.mark.rows
@needs_fork
@forks_with_threads
@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_fork_that_leaves_the_with_block_says_nothing(parallelize: int) -> None:
    made: dict[str, Any] = {"optimizer": "sgd", "parallelize": parallelize, "chunk_size": 4}  # speeds change no bit
    with loaded(nn.Linear(2, 1), nn.MSELoss(), X, Y, **made) as opt:
        before = opt.evaluate().item()
        assert Child(lambda: opt.__exit__(None, None, None)).said() == "None"
        assert opt.evaluate().item() == before
