"""Functions of the batch under adverse conditions: interrupts, hangs, late workers, limits, and what is given back."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Worker, WorkerError
from tests.building import loaded
from tests.workers.test_memory import limited
from tests.workloads import Mlp, once

X = torch.linspace(-2.0, 2.0, 40 * 6, dtype=torch.float64).reshape(40, 6).sin()
Y = torch.linspace(-1.0, 3.0, 40 * 4, dtype=torch.float64).reshape(40, 4).cos()
EACH = pytest.mark.parametrize("parallelize", [1, 2])


def make(parallelize: int, *batch: Any, **options: Any) -> BatchOptimizer:
    torch.manual_seed(0)
    return loaded(
        Mlp().double(), nn.MSELoss(), *(batch or (X, Y)), **{"parallelize": parallelize, "chunk_size": 5, **options}
    )


def outputs(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(inputs)
    return found


def gram(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return inputs.T @ inputs


def wide(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Rows that are too many to be copied."""
    return inputs.repeat(1, 1000)


@EACH
def test_a_function_is_given_samples_of_its_own(parallelize: int) -> None:
    def negated(module: nn.Module, inputs: torch.Tensor, targets: Any) -> torch.Tensor:
        array = inputs.numpy()
        array *= -1.0
        return inputs.clone()

    with make(parallelize, backend="process") as opt:
        for value in (1.0, 7.0, 3.0):
            given = torch.full_like(X, value)
            assert torch.equal(opt.collect(negated, given, Y), torch.full_like(X, -value))
            assert torch.equal(given, torch.full_like(X, value))


# ---- what comes in between


@pytest.mark.rows
@pytest.mark.parametrize("what", ["collect", "outputs"])
def test_what_a_late_worker_writes_is_in_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """It is stopped in a chunk; another one takes that over. When it goes on it writes other rows."""
    monkeypatch.setattr("batchopt.backends.process.scheduler.GRACE", 2.0)
    armed, late = tmp_path / "armed", tmp_path / "late"

    class Stops(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x).repeat(1, 1000)
            if armed.exists() and once(late):
                late.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                found = found * 0 - 1
            return found

    with BatchOptimizer(
        Stops().double(), loss_fn=None, criterion=nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=5
    ) as opt:
        targets = Y.repeat(1, 1000)
        opt.keep_outputs = True
        for _ in range(2):  # so that one knows how long it takes
            opt.load(X, targets)
            opt.evaluate()
            opt.collect(outputs)
        armed.touch()
        if what == "collect":
            found = opt.collect(outputs)
        else:
            opt.evaluate()
            found = opt.outputs()
        pid = int(late.read_text())
        stopped = psutil.Process(pid)
        assert stopped.status() == psutil.STATUS_STOPPED
        before = found.clone()
        assert (before != -1).all()
        os.kill(pid, signal.SIGCONT)
        opt.run_on_workers(lambda worker: None)  # it has done what it was at
        assert torch.equal(found, before)
        assert torch.equal(opt.collect(outputs), before)
        assert [worker.restarts for worker in opt.workers] == [0, 0]


# ---- limits


def limit(worker: Worker, what: int, number: int) -> None:
    resource.setrlimit(what, (number, resource.getrlimit(what)[1]))


@pytest.mark.slow
def test_results_of_many_batches_take_no_descriptors() -> None:
    with make(2) as opt:
        opt.predict(X)
        opened = len(os.listdir("/proc/self/fd"))
        with limited(resource.RLIMIT_NOFILE, opened + 20):
            found = opt.predict(iter([X] * 60), transform=lambda rows: rows.repeat(1, 100))
            kept = [rows for rows, _ in opt.iter_predict(iter([X] * 60), transform=lambda rows: rows.repeat(1, 100))]
    assert torch.equal(found, torch.cat(kept)) and len(found) == 60 * len(X)


def test_what_cannot_be_sent_back_is_told() -> None:
    with BatchOptimizer(nn.Linear(3, 1), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        with pytest.raises(WorkerError, match="the function returned an object that cannot be sent"):
            opt.run_on_workers(lambda worker: threading.Lock())
        assert opt.run_on_workers(lambda worker: worker.rank) == [0, 1]


def test_limits_of_workers_are_named_and_survived() -> None:
    with make(2) as opt:
        opt.run_on_workers(limit, resource.RLIMIT_FSIZE, 2**17)
        with pytest.raises(WorkerError, match="ulimit -f"):
            opt.collect(wide)
        with pytest.raises(WorkerError, match="ulimit -f"):
            opt.total(lambda m, inputs, targets: torch.zeros(300, 300))
        assert opt.collect(outputs).shape == (40, 4)


# ---- what is given back


@EACH
def test_results_die_with_their_last_reference(parallelize: int) -> None:
    with make(parallelize) as opt:
        opt.evaluate()
        gc.collect()
        gc.disable()
        try:
            for call in (
                lambda: opt.collect(wide),
                lambda: opt.total(gram),
                lambda: opt.predict(X),
                lambda: opt.evaluate_many(opt.parameters[None], gradients=True)[1],
                lambda: opt.collect(lambda m, inputs, targets: [[row] for row in inputs])[0][0],
            ):
                found = call()
                gone = weakref.ref(found)
                del found
                assert gone() is None and gc.collect() == 0
        finally:
            gc.enable()


def shared_bytes() -> int:
    """Of the memory without a name that this process has descriptors of."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "memfd" in os.readlink(entry.path):
                status = os.stat(entry.path)
                found[status.st_ino] = 512 * status.st_blocks
        except OSError:
            continue
    return sum(found.values())


@pytest.mark.slow
def test_memory_for_a_large_total_is_given_back_by_a_small_one(nobody_late: None) -> None:
    def large(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones(3000, 2000, dtype=torch.float64)

    with make(2) as opt:
        small = opt.total(gram)
        before = shared_bytes()
        for _ in range(2):
            assert opt.total(large).sum() == 8 * 6_000_000
            assert shared_bytes() > before + 2 * 48_000_000  # kept for the next one
            assert torch.equal(opt.total(gram), small)
            assert shared_bytes() < before + 2**22
            assert sum(opt.run_on_workers(lambda worker: shared_bytes())) < 2 * before + 2**22
            assert torch.equal(opt.total(gram), small)


class Scaled(nn.Module):
    """Draws, has an attribute that is no tensor, and returns many columns if it is `wide`."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mlp, self.drop = Mlp().double(), nn.Dropout(0.5)
        self.scale, self.wide = 1.0, wide

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scale * self.drop(self.mlp(inputs))
        return found.repeat(1, self.wide)


class Few(nn.MSELoss):
    """Of the first columns."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output[:, : target.shape[1]], target)


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("width", [1, 4000], ids=["copied", "mapped"])
def test_predictions_that_are_held_stay_when_others_are_made(nobody_late: None, width: int) -> None:
    """What comes between two of them is in `test_model.py`."""
    module = Scaled(width)
    with BatchOptimizer(module, Few(), parallelize=2, optimizer=None) as opt:
        opt.load(X, Y)
        kept = []
        for again in range(5):
            found, expected = opt.predict(), module.scale * module.mlp(X).detach().repeat(1, width)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            kept.append((found, found.clone()))
            if again == 2:
                del kept[0], found
            opt.parameters.add_(0.25)
        assert all(torch.equal(found, then) for found, then in kept)


# ---- the forms of all chunks have one reading, or the chunk that has another one is named

FIVE = torch.arange(5.0)[:, None]


def collected(one: Any, other: Any, sizes: tuple[int, int] = (3, 2)) -> Any:
    """What a function makes whose results these are, of two chunks of so many samples."""

    def function(module: nn.Module, inputs: torch.Tensor, targets: None) -> Any:
        return other if inputs[0] > 0 else one

    with BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), optimizer=None, chunk_size=sizes[0]) as opt:
        return opt.collect(function, FIVE[: sum(sizes)])


def test_other_chunks_decide_how_a_list_is_read_and_objects_are_one_list() -> None:
    either = [torch.zeros(2), torch.ones(2)]
    columns = collected(either, [torch.zeros(1), torch.ones(1)], (2, 1))
    assert [column.tolist() for column in columns] == [[0] * 3, [1] * 3]
    samples = collected(either, [torch.ones(4)], (2, 1))
    assert [len(sample) for sample in samples] == [2, 2, 4]
    assert collected([1, "a", None], [{}, []]) == [1, "a", None, {}, []]
    with pytest.raises((ValueError, WorkerError), match=r"one tensor a sample, or one row a sample .*return a tuple"):
        collected(either, either, (2, 2))


ROW = torch.zeros(3, 3)
DIFFERENT: list[tuple[Any, Any, str]] = [
    (ROW, torch.zeros(2, 4), r"`result` \(4,\) torch.float32 for chunk 1 \(samples 3..4\), and `result` \(3,\)"),
    (ROW, torch.zeros(2, 3).double(), r"torch.float64 for chunk 1 \(samples 3..4\), and `result` \(3,\) torch.float32"),
    (ROW, (torch.zeros(2, 3),), r"`result\[0\]` .* for chunk 1"),
    (ROW, [1, 2], "a list of objects for chunk 1"),
    ([1, 2, 3], torch.zeros(2, 3), "chunk"),
]


@pytest.mark.parametrize("row", range(len(DIFFERENT)))
def test_a_chunk_that_differs_is_named(row: int) -> None:
    one, other, words = DIFFERENT[row]
    with pytest.raises((ValueError, WorkerError), match=words):
        collected(one, other)
