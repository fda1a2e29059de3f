"""Free memory, checked before an allocation: an exception instead of a process killed by the kernel."""

from __future__ import annotations

from pathlib import Path

# A container's own control group, as it sees it: limit, usage, statistics, and the keys of memory that only caches.
_VERSIONS = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the machine has free or could free, swap included, and that the container's limit allows; None where
    that cannot be known. Rather too much than too little."""
    try:
        machine = _numbers(meminfo)
        swap = 1024 * machine.get("SwapFree", 0)
        free = 1024 * machine["MemAvailable"] + swap
    except (OSError, ValueError, KeyError):
        return None
    room = _room(cgroup)
    return free if room is None else min(free, room + swap)


def _numbers(path: Path) -> dict[str, int]:
    """Of lines such as `MemFree: 12 kB`, or without colon and unit, each name's number."""
    fields = [line.split() for line in path.read_text().splitlines()]
    return {name.rstrip(":"): int(number) for name, number, *_ in fields}


def _room(cgroup: Path) -> int | None:
    """Bytes between what the control group uses, less what only caches files, and its limit; None without one."""
    for limit, usage, statistics, cached in _VERSIONS:
        try:
            most, used = (cgroup / limit).read_text().strip(), int((cgroup / usage).read_text())
            if most == "max":
                return None
            found = _numbers(cgroup / statistics)
            return max(0, int(most) - used + sum(found.get(key, 0) for key in cached))
        except (OSError, ValueError):
            continue
    return None
