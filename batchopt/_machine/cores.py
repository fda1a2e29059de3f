"""The cores that this process may use (affinity and container quota), and torch's threads, which may spin on them."""

from __future__ import annotations

import ctypes
import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch


def usable_cores() -> int:
    """Return the cores that this process may use: its affinity mask, limited by its container's CPU quota rounded up;
    at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on this system, or forbidden in this sandbox
        cores = os.cpu_count() or 1
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def share_cores(workers: int, threads: int | None) -> list[int]:
    """Return the threads of each worker: `threads`; if that is None, the usable cores, distributed as evenly as
    possible, at least 1 each."""
    if threads is not None:
        return [threads] * workers
    each, more = divmod(usable_cores(), workers)
    return [max(1, each + (rank < more)) for rank in range(workers)]


def _quota(membership: Path, root: Path) -> float | None:
    """Return the smallest CPU quota, in cores, from this process's control group up to the root; None without one."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        base = root if is_v2 else root / "cpu"
        group = base / path.lstrip("/")
        for folder in [group, *group.parents]:
            quota = _read_v2(folder) if is_v2 else _read_v1(folder)
            if quota is not None:
                quotas.append(quota)
            if folder == base:
                break
    return min(quotas, default=None)


def _read_v2(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _read_v1(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if limit <= 0 else limit / period


class torch_threads:
    """Run with `count` intra-op threads, and restore the caller's number afterwards; None changes nothing.

    After each use torch's threads spin for some milliseconds. While workers use all cores, or are about to, one thread
    is faster.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._count is not None and self._count != self._before:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count is not None and self._count != self._before:
            torch.set_num_threads(self._before)


# Lets `omp_pause_resource_all` release threads, but no settings of the program.
_SOFT = 1


def end_spinning() -> None:
    """End the OpenMP threads that this thread has used; its next parallel region starts new ones, in 50 us.

    Each thread of the program has its own, so no other one is disturbed. Takes less than a microsecond if there are
    none. Does nothing without GNU OpenMP, which torch for Linux uses, and nothing in a fork: the threads that are known
    there were left behind, and would be waited for without end.
    """
    for pause in () if _is_fork else _pauses():
        pause(_SOFT)


_is_fork = False


def _note_fork() -> None:
    global _is_fork
    _is_fork = True


os.register_at_fork(after_in_child=_note_fork)


@cache
def _pauses() -> list[Any]:
    """Return `omp_pause_resource_all` of each copy of libgomp in this process."""
    try:
        paths = re.findall(r" (/\S*/libgomp\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        functions: list[Any] = [ctypes.CDLL(path).omp_pause_resource_all for path in dict.fromkeys(paths)]
    except (OSError, AttributeError):  # another system, or a libgomp older than OpenMP 5
        return []
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return functions
