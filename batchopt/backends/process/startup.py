"""The start of worker processes: the check for room, and the calls that precede the program."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import process
from typing import Any

import torch

from batchopt._program.unpicklable import sending
from batchopt.backends.base import Setup
from batchopt.backends.process.forkserver import import_path, worker_environment
from batchopt.backends.process.wanted import Activity, SessionCall
from batchopt.backends.process.worker import call, call_with_block
from batchopt.errors import BatchoptError
from batchopt_workers.life.session import Session
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.wire.memory import SharedBlock

# Measured needs of one worker process: bytes of private memory, with torch imported and an allocator that keeps its
# memory; and open files of this process, for its pipes and its gradients.
WORKER_MEMORY = 220_000_000
WORKER_DESCRIPTORS = 7


def check_workers(workers: int) -> None:
    """Raise `BatchoptError` where this process cannot start others, `ValueError` where there is no room for them."""
    check_surroundings()
    check_room(workers, *_room())


def room_for(workers: int) -> int:
    """Return how many of `workers` processes there is room for; 1, this process, where it cannot start others."""
    try:
        check_surroundings()
    except BatchoptError:
        return 1
    return max(min(workers, most_workers(*_room())), 1)


def _room() -> tuple[int, float]:
    """Return this machine's memory in bytes, and how many files this process may open."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return memory, math.inf if descriptors == resource.RLIM_INFINITY else descriptors


def check_surroundings() -> None:
    """Raise `BatchoptError` where this process cannot start others."""
    if not os.path.isdir("/proc/self/fd"):
        raise BatchoptError(
            "/proc is not mounted here, and worker processes need it: mount it (`mount -t proc proc /proc`), or use "
            "parallelize=1"
        )
    try:
        os.getcwd()
    except OSError as error:
        raise BatchoptError(
            f"this process's working directory cannot be used ({error}), and workers begin there: it was deleted, "
            "perhaps; os.chdir to one that is there"
        ) from error


def most_workers(memory: int, descriptors: float) -> int:
    """Return how many workers need no more than `memory` bytes, and `descriptors` open files of this process."""
    return int(min(memory // WORKER_MEMORY, descriptors // WORKER_DESCRIPTORS))


def check_room(workers: int, memory: int, descriptors: float) -> None:
    """Raise `ValueError` if `workers` processes need more than `memory` bytes, or more than `descriptors` open files
    of this process."""
    most = most_workers(memory, descriptors)
    if workers <= most:
        return
    raise ValueError(
        f"`parallelize` {workers} needs about {workers * WORKER_MEMORY / 1e9:.1f} GB of memory and "
        f"{workers * WORKER_DESCRIPTORS} open files; this machine has {memory / 1e9:.1f} GB, and `ulimit -n` allows "
        f"{descriptors} files: use at most {max(most, 1)}"
    )


def startup_calls(
    setup: Setup,
    parameters: SharedBlock,
    settings: TorchSettings,
    threads: int,
    devices: Mapping[int, torch.device] | None,
) -> dict[str, tuple[Sequence[SessionCall], object]]:
    """Return the calls for each field of what workers must have at first, and its value. Raises `TypeError` for a
    precode that cannot be sent."""
    environment = worker_environment(threads)
    prepare = call(Activity.STARTING, Session.prepare, environment, _preparation(), sys.getrecursionlimit())
    use = [
        call_with_block(Activity.INSTALLING, Session.attach, "parameters", parameters),
        call(Activity.INSTALLING, Session.use_parameters, setup.flat.layout),
    ]
    found: dict[str, tuple[Sequence[SessionCall], object]] = {
        "process": ([prepare], None),
        "torch": ([call(Activity.STARTING, Session.set_torch, settings)], settings),
        "parameters": (use, None),
        "hooked": ([], True),
        "weights": ([], (1.0,) * len(setup.program.loss_fns)),
    }
    if devices is not None:
        found["devices"] = [call(Activity.STARTING, Session.use, devices)], None
    if setup.precode is not None:
        with sending("`precode`", setup.precode):
            found["precode"] = [call(Activity.PRECODE, Session.run, setup.precode)], None
    return found


def _preparation() -> dict[str, Any]:
    """Return multiprocessing's preparation data without `__main__` and without a start method."""
    current = process.current_process()
    if getattr(current, "_inheriting", False):
        raise RuntimeError(
            "batchopt was started while a spawned child was importing the main script: "
            'put the script under `if __name__ == "__main__":`'
        )
    return {
        "log_to_stderr": False,
        "authkey": bytes(current.authkey),
        "sys_path": import_path(),
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }
