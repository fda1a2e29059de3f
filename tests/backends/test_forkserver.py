"""The process that workers are forked from."""

from __future__ import annotations

import multiprocessing.spawn
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Worker, WorkerStartError
from batchopt.backends.process import forkserver
from tests.backends.scripts import SCRIPT, assert_gone


def small() -> BatchOptimizer:
    """Two workers, whose bits do not depend on their speeds."""
    return BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer=None, parallelize=2, chunk_size=3)


def latest() -> psutil.Process:
    """The fork server of the last workers, as the system sees it."""
    return psutil.Process(forkserver._kept[-1]._process.pid)


def start(worker: Worker) -> list[int]:
    """A process of the worker's group, a fork that holds all files of the worker, and one that nobody waits for."""
    child = subprocess.Popen(["sleep", "60"]).pid
    fork = os.fork()
    if fork == 0:
        time.sleep(60)
        os._exit(0)
    script = "import os, time\nif os.fork() == 0:\n    print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        return [child, fork, int(process.stdout.readline())]


@pytest.mark.slow
def test_it_is_kept_for_the_next_workers_when_it_has_ended_what_workers_left() -> None:
    with small() as opt:
        first, orphans = latest(), [pid for pids in opt.run_on_workers(start) for pid in pids]
    assert_gone(orphans, 10.0)
    with small() as opt:
        assert latest() == first
        assert {psutil.Process(worker.pid).ppid() for worker in opt.workers} == {first.pid}
        opt.resize(1)
        opt.resize(2)
        assert {psutil.Process(worker.pid).ppid() for worker in opt.workers} == {first.pid}


@pytest.mark.slow
def test_workers_are_as_a_new_process_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def look(worker: Worker) -> tuple[str | None, str, str, list[str]]:
        return os.environ.get("BATCHOPT_TEST_THING"), os.getcwd(), sys.path[-1], sys.argv

    def draw(worker: Worker) -> tuple[float, float]:
        return random.random(), numpy.random.rand()

    with small():
        first = latest()
    monkeypatch.setenv("BATCHOPT_TEST_THING", "new")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.append("/nowhere")
    monkeypatch.setattr(sys, "argv", ["program", "argument"])
    try:
        with small() as opt:
            assert latest() != first  # some library may read the variable when it loads
            expected = ("new", str(tmp_path), "/nowhere", ["program", "argument"])
            assert opt.run_on_workers(look) == [expected, expected]
            one, other = opt.run_on_workers(draw)
            assert one[0] != other[0] and one[1] != other[1]
    finally:
        sys.path.remove("/nowhere")


@pytest.mark.nightly
def test_each_number_of_threads_has_its_own_until_others_are_needed_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def origin(threads: int) -> psutil.Process:
        model = nn.Linear(2, 1)
        with BatchOptimizer(model, nn.MSELoss(), optimizer=None, parallelize=2, threads_per_worker=threads) as opt:
            (parent,) = {psutil.Process(worker.pid).ppid() for worker in opt.workers}
        return psutil.Process(parent)

    monkeypatch.setenv("BATCHOPT_TEST_BARE", "1")
    monkeypatch.setattr("batchopt.backends.process.forkserver._kept", [])  # not at the cost of the other tests'
    first, second = origin(1), origin(2)
    assert first != second
    assert (origin(1), origin(2)) == (first, second)
    monkeypatch.setattr("batchopt.backends.process.forkserver.KEPT", 1)
    assert origin(2) == second
    _, left = psutil.wait_procs([first], timeout=10)
    assert not left


@pytest.mark.slow
def test_workers_end_with_it_and_the_next_ones_get_another() -> None:
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    with small() as opt:
        opt.load(x, y)
        before = opt.evaluate().item()
        first, workers = latest(), [worker.pid for worker in opt.workers]
        first.kill()
        assert_gone(workers)
        assert opt.evaluate().item() == before
        opt.run_on_workers(lambda worker: None)  # waits for the new ones
        assert latest() != first
        assert [worker.restarts for worker in opt.workers] == [1, 1]


def test_what_it_says_when_it_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no libraries here >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("BATCHOPT_TEST_THING", "another")
    before = multiprocessing.spawn.get_executable()
    multiprocessing.spawn.set_executable(str(program))
    try:
        with pytest.raises(WorkerStartError, match=r"(?s)ended with code 3.*no libraries here"):
            small()
    finally:
        multiprocessing.spawn.set_executable(before)


@pytest.mark.slow
def test_it_ends_when_nobody_has_needed_it_for_a_while() -> None:
    script = """
    import os, sys
    from batchopt_workers.life import forkserver
    forkserver.LINGER = 0.05
    forkserver.main(int(sys.argv[1]), os.getppid())
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-c", textwrap.dedent(script), str(theirs.fileno())]
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=280).returncode == 0


@pytest.mark.rows
@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "<&-", "2>&-"])
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT + "opt.close()\nopen(sys.argv[1], 'w').write('END')")
    command = f'exec "$0" program.py said {closed}'
    ended = subprocess.run(["sh", "-c", command, sys.executable], cwd=tmp_path, timeout=280, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "said").read_text() == "END"


@pytest.mark.slow
def test_what_a_worker_started_and_names_in_shared_memory_goes_with_it() -> None:
    def take(worker: Worker) -> list[str]:
        memory = shared_memory.SharedMemory(create=True, size=100)
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        worker.state["kept"] = memory, semaphore
        return [memory.name, semaphore._semlock.name.lstrip("/")]  # type: ignore[attr-defined]

    with small() as opt:
        (first, second), server = opt.run_on_workers(start), latest()
        names = opt.run_on_workers(take)[0]
        os.kill(opt.workers[0].pid, signal.SIGKILL)
        opt.load(torch.ones(6, 2), torch.ones(6, 1))
        opt.evaluate()
        assert_gone(first)
        assert all(psutil.pid_exists(pid) for pid in [*second, server.pid])
        until = time.monotonic() + 10
        while any(name in entry for name in names for entry in os.listdir("/dev/shm")):
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.nightly
def test_a_slow_start_is_reported_with_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(1.0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BATCHOPT_TEST_THING", "another fork server")
    monkeypatch.setattr("batchopt.backends.process.forkserver.libraries_of", lambda program: ["slow_library"])
    monkeypatch.setattr("batchopt.backends.process.backend.libraries_of", lambda program: ["slow_library"])
    monkeypatch.setattr("batchopt.backends.process.forkserver.SLOW", 0.2)
    monkeypatch.setattr("batchopt.backends.process.forkserver.ANSWERING", 0.1)
    monkeypatch.setattr("batchopt.backends.process.forkserver.logger.propagate", False)  # as if no handler were set up
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), parallelize=2, verbose=1):
        shown = capfd.readouterr().err
    assert "batchopt: waiting for the process that workers are forked from, which imports torch, slow_library" in shown
    assert shown.count("waiting for") == 1
