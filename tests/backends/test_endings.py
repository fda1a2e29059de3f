"""However a program or a worker ends, and whoever else is there, nothing hangs and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchOptimizer, Worker
from tests.backends.scripts import SCRIPT, assert_gone, pids, python, running
from tests.building import on
from tests.conftest import is_fork_server
from tests.workloads import Mlp, mlp


def assert_works(opt: BatchOptimizer) -> None:
    """An evaluation is that of plain torch."""
    case = mlp()
    with torch.no_grad():
        for ours, theirs in zip(opt.module.parameters(), case.module.parameters(), strict=True):
            theirs.copy_(ours)
    opt.load(case.inputs, case.targets)
    assert opt.evaluate().item() == pytest.approx(case.reference()[0], rel=1e-12)


# ---- the parent ends: programs, and the codes with which they do. All processes of PIDS are gone then

SERVER = """
import os, signal, subprocess
def pid_of_server():
    return opt.run_on_workers(lambda worker: __import__("os").getppid())[0]
server = pid_of_server()
print("PIDS", server, flush=True)
"""
STOPPED = SERVER + "os.kill(server, signal.SIGSTOP)\n"
REPLACED = """
os.kill(opt.workers[0].pid, signal.SIGKILL)
opt.evaluate()
opt.run_on_workers(lambda worker: None)  # waits for the new one
assert pid_of_server() == server  # it goes on
print("PIDS", *[worker.pid for worker in opt.workers])
"""
KILLED_AT_WORK = """
def work(worker, parent):
    import os, signal, time
    os.kill(parent, signal.SIGKILL)
    time.sleep(60)
opt.run_on_workers(work, os.getpid())
"""
FEW = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n"
PROGRAMS: dict[str, tuple[str, int]] = {
    "exits": (SCRIPT + "sys.exit(3)", 3),
    "raises": (SCRIPT + "raise RuntimeError('on purpose')", 1),
    "has few descriptors": (FEW + SCRIPT.replace("parallelize=2", "parallelize=4"), 1),
    "has stopped a worker": (SCRIPT + "import os\nos.kill(opt.workers[1].pid, 19)", 0),
    "is killed at work": (SCRIPT + SERVER + KILLED_AT_WORK, -signal.SIGKILL),
    "has stopped what workers are forked from, and needs it": (SCRIPT + STOPPED + REPLACED, 0),
}


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_however_a_program_ends_its_processes_do(name: str) -> None:
    """Under the limit of `python`, which a wait for a process that is stopped would exceed."""
    script, code = PROGRAMS[name]
    ended = python("-c", script)
    assert ended.returncode == code, ended.stderr
    assert_gone(pids(ended.stdout))
    if name == "has few descriptors":
        assert "open files" in ended.stderr and "leaked" not in ended.stderr


IMPORTING = """
import os, sys, time
if "batchopt-forkserver" in sys.orig_argv:
    print("PIDS", os.getpid(), flush=True)
    time.sleep(60)
"""
FORKED = """
if os.fork() == 0:  # holds the parent's end of everything
    import time; time.sleep(60)
print("ENDS", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("script, word", [(SCRIPT, "PIDS"), (SCRIPT + SERVER + FORKED, "ENDS")])
def test_what_workers_are_forked_from_ends_with_its_parent(tmp_path: Path, script: str, word: str) -> None:
    """Also while it imports, or if a fork lives on."""
    if word == "PIDS":
        (tmp_path / "sitecustomize.py").write_text(IMPORTING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with running(script, word, env=environment, start_new_session=True) as (parent, said):
        try:
            if word == "PIDS":
                parent.kill()
            assert_gone(pids(said))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


WORK = """
import time
def slowly(worker, sample):
    print("BUSY", flush=True)
    time.sleep(60)
opt.prehook = slowly
opt.load(x, y)
"""


def interrupted(script: str, *signals: signal.Signals, busy: int = 1) -> tuple[int, str, float]:
    """Run the script, and signal it when it has said BUSY so often; its exit code, what it printed, and how long it
    then took."""
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with running(handler + script, *["BUSY"] * busy, stderr=subprocess.STDOUT) as (program, said):
        started = time.monotonic()
        for number in signals:
            program.send_signal(number)
            time.sleep(0.05)  # two in one moment would be one
        assert program.stdout is not None
        said += program.stdout.read()
        code = program.wait(30)
    return code, said, time.monotonic() - started


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_a_signal_ends_a_busy_program_and_its_workers(signals: tuple[signal.Signals, ...]) -> None:
    code, said, seconds = interrupted(SCRIPT + WORK + "opt.evaluate()", *signals)
    assert code == -signals[0], said
    assert ("KeyboardInterrupt" in said) == (signal.SIGINT in signals)
    assert_gone(pids(said))
    assert seconds < 20


@pytest.mark.slow
def test_after_ctrl_c_in_a_function_that_hangs_there_are_new_workers() -> None:
    then = """
def hang(worker):
    import time
    print("BUSY", flush=True)
    time.sleep(1e6)
try:
    opt.run_on_workers(hang)
except KeyboardInterrupt:
    print("CAUGHT", flush=True)
opt.load(x, y)
right = abs(opt.evaluate().item() - expected) < 1e-6  # whoever is there first evaluates all
opt.run_on_workers(lambda worker: None)  # waits for the other one
print(right, [worker.restarts for worker in opt.workers])
"""
    code, said, _ = interrupted(SCRIPT + then, signal.SIGINT, busy=2)
    assert code == 0 and "CAUGHT" in said and said.endswith("True [1, 1]\n"), said


# ---- a worker ends, or should not


@pytest.mark.slow
def test_who_writes_the_parameters_ends_two_workers_and_no_more_and_they_are_untouched() -> None:
    """With many chunks, each of which could end some, no worker would be left before one of them is poison."""

    def spoil(module: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            next(module.parameters()).mul_(2.0)
        return inputs

    case = mlp()
    with BatchOptimizer(case.module, case.criterion, parallelize=2, max_restarts=6, chunk_size=4) as opt:
        opt.load(case.inputs, case.targets)
        expected, before = opt.evaluate(), opt.parameters.clone()
        with pytest.raises(batchopt.WorkerLostError, match=r"SIGSEGV .* in the function"):
            opt.collect(spoil)
        assert opt.evaluate() == expected
        opt.prehook = lambda worker, sample: (spoil(worker.module, sample.inputs, None), None)[1]  # type: ignore[arg-type]
        with pytest.raises(batchopt.WorkerLostError, match=r"SIGSEGV .* in the first forward") as lost:
            opt.step(case.inputs, case.targets)
        assert "in spoil" in str(lost.value) and len(str(lost.value).splitlines()) == 1  # standard error has the place
        opt.prehook = None
        assert torch.equal(opt.parameters, before)
        assert_works(opt)


class Lazy(nn.Module):
    """Writes its parameters when it is called first."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(6, 4), writes
        self.register_buffer("started", torch.zeros(1, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool(self.get_buffer("started")):
            with torch.no_grad():
                self.linear.weight.fill_(0.5) if self.writes else setattr(self, "extra", nn.Parameter(torch.ones(1)))
                self.get_buffer("started").fill_(True)
        y: torch.Tensor = self.linear(x)
        return y


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True])
def test_parameters_that_the_first_forward_writes_are_one_clear_error(hooked: bool) -> None:
    data, module = (torch.rand(8, 6), torch.rand(8, 4)), Lazy(writes=True)
    hook = (lambda worker, sample: None) if hooked else None  # then nothing is measured first
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=2, prehook=hook) as opt:
        words = r"in forward; called .* call the module once before"
        with pytest.raises(batchopt.WorkerLostError, match=words) as lost:
            opt.load(*data)
            opt.evaluate()
        assert "test_endings.py" in str(lost.value) and len(str(lost.value).splitlines()) == 1
        module(data[0])
        opt.load(*data)
        expected = nn.functional.mse_loss(module(data[0]), data[1]).item()
        assert opt.evaluate().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_parameters_that_the_first_forward_makes_are_one_clear_error(parallelize: int) -> None:
    data = torch.rand(8, 6), torch.rand(8, 4)
    with BatchOptimizer(Lazy(writes=False), nn.MSELoss(), optimizer=None, parallelize=parallelize) as opt:
        words = r"the parameter 'extra' was made by the first forward, .* call the"
        with pytest.raises(batchopt.WorkerError, match=words):
            opt.load(*data)
            opt.evaluate()


def test_a_worker_of_other_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchopt.backends.process.pool.versions", lambda: "Python 3.14, torch 9.0")
    with pytest.raises(batchopt.WorkerStartError, match=r"runs with Python .*, this process with .*torch 9"):
        BatchOptimizer(Mlp(), nn.MSELoss(), parallelize=2)


@pytest.mark.slow
def test_a_hundred_replaced_workers_leave_no_descriptor_and_no_process() -> None:
    case = mlp()
    with BatchOptimizer(case.module, case.criterion, parallelize=2, chunk_size=4, max_restarts=1000) as opt:
        opt.step(case.inputs, case.targets)
        opt.run_on_workers(lambda worker: None)
        before = psutil.Process().num_fds()
        for round_ in range(15):
            os.kill(opt.workers[round_ % 2].pid, signal.SIGKILL)
            opt.step(case.inputs, case.targets)
            opt.run_on_workers(lambda worker: None)  # waits for the new one
        # a worker has one to four blocks of rows, as it happens; one that is lost would leave more than 15
        assert psutil.Process().num_fds() <= before + 6
        workers = [child for child in psutil.Process().children(recursive=True) if not is_fork_server(child.pid)]
        assert len(workers) == 2
        assert sum(worker.restarts for worker in opt.workers) == 15


# ---- who else is there


def test_workers_outlive_the_thread_that_made_them() -> None:
    made: list[BatchOptimizer] = []
    thread = threading.Thread(target=lambda: made.append(BatchOptimizer(Mlp().double(), nn.MSELoss(), parallelize=2)))
    thread.start()
    thread.join()
    with made[0] as opt:
        assert_works(opt)
        assert [worker.restarts for worker in opt.workers] == [0, 0]


@pytest.mark.nightly
def test_a_worker_may_have_workers_of_its_own() -> None:
    def nested(worker: Worker) -> tuple[float, list[int]]:
        import torch

        import batchopt

        torch.manual_seed(0)
        with batchopt.BatchOptimizer(torch.nn.Linear(2, 1), torch.nn.MSELoss(), parallelize=2, optimizer=None) as opt:
            opt.load(torch.ones(4, 2), torch.ones(4, 1))
            return opt.evaluate().item(), [inner.pid for inner in opt.workers]

    with BatchOptimizer(Mlp().double(), nn.MSELoss(), parallelize=2) as opt:
        (one, first), (two, second) = opt.run_on_workers(nested)
        assert one == two and len({*first, *second}) == 4
        assert_gone([*first, *second])


# ---- between steps


@pytest.mark.slow
def test_workers_that_cannot_be_added_leave_those_that_there_are() -> None:
    def fail(worker: Worker) -> None:
        if worker.rank == 2:
            raise OSError("no third device")

    with BatchOptimizer(Mlp().double(), nn.MSELoss(), parallelize=2, precode=fail) as opt:
        with pytest.raises(batchopt.WorkerError, match="OSError in worker 2, running precode: no third device"):
            opt.resize(3)
        assert_works(opt)
        assert [(worker.rank, worker.alive, worker.restarts) for worker in opt.workers] == [(0, True, 0), (1, True, 0)]
        assert opt.run_on_workers(lambda worker: worker.world_size) == [2, 2]


def test_workers_that_cannot_be_replaced_say_why(tmp_path: Path) -> None:
    def precode(worker: Worker) -> None:
        if (tmp_path / "broken").exists():
            raise LookupError("no such device")

    with on(mlp(), parallelize=2, precode=precode) as opt:
        (tmp_path / "broken").touch()
        for worker in opt.workers:
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(
            batchopt.AllWorkersLostError, match=r"could not start \(LookupError .*no such device\) and was"
        ):
            opt.evaluate()
