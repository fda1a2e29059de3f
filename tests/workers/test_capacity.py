"""What is said to be free, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchopt_workers.data.mapping import free_memory

MEMINFO = """MemTotal:       24684084 kB
MemFree:        10000000 kB
MemAvailable:   12000000 kB
SwapTotal:       2000000 kB
SwapFree:        1000000 kB
HugePages_Total:       0
"""
MACHINE = 13_000_000 * 1024
SWAP = 1_000_000 * 1024


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def free(folder: Path, meminfo: str | None = MEMINFO, **groups: str) -> int | None:
    """With these files; two underscores stand for a slash."""
    write(folder, {} if meminfo is None else {"meminfo": meminfo})
    write(folder / "cgroup", {name.replace("__", "/"): text for name, text in groups.items()})
    return free_memory(folder / "meminfo", folder / "cgroup")


def of_version_2(limit: str, current: str = "600\n") -> dict[str, str]:
    return {
        "memory.max": limit,
        "memory.current": current,
        "memory.stat": "anon 500\ninactive_file 60\nactive_file 40\nslab 7\n",
    }


def of_version_1(limit: int) -> dict[str, str]:
    return {
        "memory__memory.limit_in_bytes": f"{limit}\n",
        "memory__memory.usage_in_bytes": "600\n",
        "memory__memory.stat": "cache 70\ninactive_file 1\ntotal_inactive_file 60\ntotal_active_file 40\n",
    }


def test_of_a_machine_what_is_available_and_swap(tmp_path: Path) -> None:
    assert free(tmp_path) == MACHINE


def test_without_swap(tmp_path: Path) -> None:
    assert free(tmp_path, "MemAvailable: 5 kB\n") == 5 * 1024


@pytest.mark.parametrize("meminfo", [None, "", "MemFree: 1 kB\n", "MemAvailable: none\n", "MemAvailable\n"])
def test_nothing_is_said_of_what_is_not_known(tmp_path: Path, meminfo: str | None) -> None:
    assert free(tmp_path, meminfo, **of_version_2("1000\n")) is None


def test_of_a_container_what_is_below_its_limit_and_what_only_caches(tmp_path: Path) -> None:
    assert free(tmp_path, **of_version_2("1000\n")) == 1000 - 600 + 100 + SWAP


def test_of_a_container_of_the_first_version_likewise(tmp_path: Path) -> None:
    assert free(tmp_path, **of_version_1(1000)) == 1000 - 600 + 100 + SWAP


def test_a_container_over_its_limit_has_nothing_but_swap(tmp_path: Path) -> None:
    assert free(tmp_path, **of_version_2("400\n")) == SWAP


@pytest.mark.parametrize(
    "groups",
    [
        of_version_2("max\n"),
        of_version_1(9223372036854771712),
        of_version_2("400\n", "unreadable\n"),
        {"memory.max": "400\n"},
    ],
    ids=["version 2", "version 1", "usage unknown", "usage missing"],
)
def test_without_a_limit_that_is_known_the_machine_is_all(tmp_path: Path, groups: dict[str, str]) -> None:
    assert free(tmp_path, **groups) == MACHINE


def test_the_machine_at_hand_has_something_free() -> None:
    found = free_memory()
    assert found is None or found > 2**20
