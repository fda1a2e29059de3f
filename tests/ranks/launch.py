"""Starts ranks: as torchrun does, each is told its number and where all of them meet; or by what starts them."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import subprocess
import sys
import tempfile
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


# ---- what else starts them


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "workers")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}


def launch(*command: object, **variables: str) -> str:
    """What is printed by what a launcher starts."""
    arguments = [*map(str, command)]
    found = subprocess.run(
        arguments, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=280
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


def torchrun(restarts: int = 0) -> list[str]:
    options = ["--nproc-per-node", "2", "--max-restarts", str(restarts), f"--master-port={free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", *options]
