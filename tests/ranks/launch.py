"""Starts processes as torchrun does: each is told its rank, and where all of them meet."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    """A port where nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _variables(size: int, port: int) -> dict[str, str]:
    found = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in found.items()}


def start(
    arguments: Sequence[str], rank: int, size: int, port: int, environment: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    """Start `python *arguments` as one of the ranks; its output is to be read."""
    given = {**_variables(size, port), "RANK": str(rank)}
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


# Forks processes that have imported what a rank needs: importing torch takes longer than most programs.
_forks: Any = mp.get_context("forkserver")
_forks.set_forkserver_preload(["tests.ranks.programs"])


def end_forks() -> None:
    """End the process that ranks are forked from."""
    forkserver: Any = mp.forkserver._forkserver
    tracker: Any = mp.resource_tracker._resource_tracker
    forkserver._stop()
    tracker._stop()


def _rank(environment: dict[str, str], output: Path, name: str, arguments: list[str]) -> None:
    """The life of a rank."""
    from tests.ranks import programs

    os.environ.update(environment)
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    programs.RANK = int(environment["RANK"])
    getattr(programs, name)(*arguments)


def program(name: str, *arguments: object, size: int = 2, lacking: int | None = None) -> list[str]:
    """The last line that each rank prints in a program of `programs.py`; without the rank that is `lacking`, since it
    is lost."""
    with tempfile.TemporaryDirectory() as folder:
        outputs, common = [Path(folder) / str(rank) for rank in range(size)], _variables(size, free_port())
        ranks = [
            _forks.Process(target=_rank, args=({**common, "RANK": str(i)}, output, name, [*map(str, arguments)]))
            for i, output in enumerate(outputs)
        ]
        try:
            for rank in ranks:
                rank.start()
            for i, rank in enumerate(ranks):
                if i != lacking:
                    rank.join(120.0)
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        return [output.read_text().strip().splitlines()[-1] for i, output in enumerate(outputs) if i != lacking]
