"""Nodes that are processes of this machine, reached over the loopback: a cluster without a cluster."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from batchopt.backends import BACKENDS
from batchopt.backends.base import Setup
from batchopt.backends.nodes.backend import NodesBackend
from batchopt.backends.nodes.group import Group
from batchopt.backends.nodes.placing import Capacity

ROOT = Path(__file__).parent.parent.parent
# It is told on its input which node it is, again and again, and says when that has ended: torch is imported once.
PROGRAM = """
import sys
from batchopt.backends.nodes.node import serve
for line in sys.stdin:
    address, port, number = line.split()
    serve(address, int(port), int(number))
    print("idle", flush=True)
"""
# Seconds in which a node that was told to end does; one that was not, or is stopped, never does.
GRACE = 1.0
_idle: list[subprocess.Popen[str]] = []


def _process() -> subprocess.Popen[str]:
    while _idle:
        process = _idle.pop()
        if process.poll() is None:
            return process
    paths = os.pathsep.join([str(ROOT), str(ROOT / "workers")])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def idle() -> list[int]:
    """The processes that wait for their next node."""
    return [process.pid for process in _idle]


def end() -> None:
    """End those that wait for their next node."""
    while _idle:
        discard(_idle.pop())


def discard(process: subprocess.Popen[str]) -> None:
    """End a node's process."""
    process.kill()
    process.wait()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()


class LocalNode:
    """A node's process."""

    def __init__(self, address: str, port: int, number: int) -> None:
        self.process = _process()
        self._is_over = False
        assert self.process.stdin is not None
        self.process.stdin.write(f"{address} {port} {number}\n")
        self.process.stdin.flush()

    def gone(self) -> str | None:
        """See `NodeProcess`."""
        code = self.process.poll()
        return None if code is None else f"ended with {code}"

    def kill(self) -> None:
        """See `NodeProcess`: one that was told to end is kept for another node."""
        if self._is_over:
            return
        self._is_over = True
        assert self.process.stdout is not None and self.process.stdin is not None
        # Of one that has died, a worker may still hold the other end of its pipe.
        ready, _, _ = select.select([self.process.stdout], [], [], GRACE if self.gone() is None else 0.0)
        if ready and self.process.stdout.readline() == "idle\n":
            _idle.append(self.process)
        else:
            discard(self.process)


class LocalPlacer:
    """Machines of this name, each with room for so many workers."""

    address = "127.0.0.1"
    machines: ClassVar[dict[str, int]] = {"one": 4, "two": 4}

    def __init__(self) -> None:
        self.nodes: list[tuple[str, int, LocalNode]] = []

    def rooms(self, whole: bool = False) -> list[Capacity]:
        """See `Placer`."""
        free = dict(self.machines)
        for machine, workers, node in self.nodes:
            if not whole and node.gone() is None:
                free[machine] -= workers
        return [Capacity(machine, workers) for machine, workers in sorted(free.items()) if workers > 0]

    def place(self, machine: str, workers: int, address: str, port: int, number: int) -> LocalNode:
        """See `Placer`."""
        node = LocalNode(address, port, number)
        self.nodes.append((machine, workers, node))
        return node

    def refusal(self, workers: int, free: int, whole: int) -> str:
        """See `Placer`."""
        return f"{workers} workers are asked for; there is room for {free} more"


class LocalNodesBackend(NodesBackend):
    """The backend with nodes on this machine."""

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        return None if parallelize == "auto" else super().read_workers(parallelize)

    def placer(self, setup: Setup) -> LocalPlacer:
        return LocalPlacer()


def name(patch: pytest.MonkeyPatch) -> None:
    """Have `backend="local nodes"` be that one."""
    patch.setitem(BACKENDS, "local nodes", "tests.nodes.local:LocalNodesBackend")


class Traffic:
    """Bytes that this process sends to nodes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        send = Group.send

        def counting(group: Group, vector: torch.Tensor, to: int, tag: int = 0) -> None:
            self.sent += vector.nbytes
            send(group, vector, to, tag)

        patch.setattr(Group, "send", counting)
