"""The number of cores that this process may use (affinity and container quota)."""

from __future__ import annotations

import math
import os
from pathlib import Path


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
