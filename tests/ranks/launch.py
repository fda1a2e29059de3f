"""Starts processes as torchrun does: each is told its rank, and where all of them meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    """A port where nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(
    arguments: Sequence[str], rank: int, size: int, port: int, environment: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    """Start `python *arguments` as one of the ranks; its output is to be read."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    given = {name: str(value) for name, value in (variables | {"MASTER_PORT": port}).items()}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "workers")])
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launched(
    arguments: Sequence[str], size: int, seconds: float = 120.0, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """What each of `size` ranks prints. Fails if one of them does."""
    port = free_port()
    ranks = [start(arguments, rank, size, port, environment) for rank in range(size)]
    try:
        found = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, output in zip(ranks, found, strict=True):
        assert rank.returncode == 0, "\n".join(output[-6000:] for output in found)
    return found


def program(name: str, *arguments: object, size: int = 2, lacking: int | None = None) -> list[str]:
    """The last line that each rank prints in a program of `programs.py`; without the rank that is `lacking`, since it
    is lost."""
    port = free_port()
    ranks = [start(["-m", "tests.ranks.programs", name, *map(str, arguments)], i, size, port) for i in range(size)]
    try:
        found = [rank.communicate(timeout=120.0)[0] for i, rank in enumerate(ranks) if i != lacking]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
    return [output.strip().splitlines()[-1] for output in found]
