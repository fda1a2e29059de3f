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
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Worker, WorkerStartError
from batchopt.backends import template
from batchopt_workers.template import REPLY, REQUEST, Request, Task


def small() -> BatchOptimizer:
    """Two workers."""
    return BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), optimizer=None, parallelize=2)


def latest() -> psutil.Process:
    """The template as the system sees it."""
    assert template._latest is not None
    return psutil.Process(template._latest._process.pid)


def test_it_is_kept_for_the_next_workers() -> None:
    with small():
        first = latest()
    with small() as opt:
        assert latest() == first
        assert {psutil.Process(worker.pid).ppid() for worker in opt.workers} == {first.pid}


def test_workers_are_as_a_new_process_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def look(worker: Worker) -> tuple[str | None, str, str, list[str]]:
        return os.environ.get("BATCHOPT_TEST_THING"), os.getcwd(), sys.path[-1], sys.argv

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
    finally:
        sys.path.remove("/nowhere")
    _, left = psutil.wait_procs([first], timeout=10)
    assert not left


def test_each_worker_draws_its_own_random_numbers() -> None:
    with small() as opt:
        numbers = opt.run_on_workers(lambda worker: (random.random(), numpy.random.rand()))
    assert numbers[0][0] != numbers[1][0] and numbers[0][1] != numbers[1][1]


def test_workers_go_on_without_it_and_the_next_ones_get_another() -> None:
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    with small() as opt:
        opt.load(x, y)
        before = opt.evaluate().item()
        first = latest()
        first.kill()
        first.wait(10)
        assert opt.evaluate().item() == before
        os.kill(opt.workers[0].pid, signal.SIGKILL)
        assert opt.evaluate().item() == before
        opt.run_on_workers(lambda worker: None)  # waits for the new one
        assert latest() != first
        assert opt.workers[0].restarts == 1


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


def test_it_ends_with_its_parent() -> None:
    script = """
    import os, signal, torch, batchopt
    from batchopt.backends import template
    with batchopt.BatchOptimizer(torch.nn.Linear(2, 1), torch.nn.MSELoss(), parallelize=2):
        pass
    if os.fork() == 0:  # holds the parent's end of everything
        import time; time.sleep(60)
    print(template._latest._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            if psutil.pid_exists(pid):
                _, left = psutil.wait_procs([psutil.Process(pid)], timeout=10)
                assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
        finally:
            os.killpg(parent.pid, signal.SIGKILL)  # the fork


def test_it_ends_when_nobody_has_needed_it_for_a_while() -> None:
    script = """
    import os, sys
    from multiprocessing.connection import Connection
    from batchopt_workers import template
    template.LINGER = 0.05
    template.main(Connection(int(sys.argv[1])), os.getppid())
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", textwrap.dedent(script), str(theirs.fileno())]
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=60).returncode == 0


def test_a_request_is_what_it_was() -> None:
    request = Request(7, Task.FORK, 3, 5, 2)
    assert Request.decode(request.encode()) == request
    assert len(request.encode()) == REQUEST.size
    assert REPLY.unpack(REPLY.pack(2**40, -11)) == (2**40, -11)
