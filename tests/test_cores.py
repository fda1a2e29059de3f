"""Usable cores: the affinity mask, and the CPU quota of control groups, version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchopt._machine.cores import _quota, usable_cores


def groups(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A membership file and a tree of control groups with these files."""
    for path, text in files.items():
        target = folder / "cgroup" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "membership").write_text(membership)
    return folder / "membership", folder / "cgroup"


@pytest.mark.parametrize(
    "membership, files, quota",
    [
        ("0::/app\n", {"app/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/app\n", {"app/cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "0::/pod/app\n",
            {"pod/app/cpu.max": "400000 100000\n", "pod/cpu.max": "300000 200000\n", "cpu.max": "max 100000\n"},
            1.5,
        ),
        ("0::/host/path/unseen/inside\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/app\n", {"app/cpu.max": "garbage\n"}, None),
        ("0::/app\n", {"../cpu.max": "100000 100000\n"}, None),
        ("0::/app\n", {"other/cpu.max": "100000 100000\n"}, None),
        (
            "4:cpu,cpuacct:/app\n",
            {"cpu/app/cpu.cfs_quota_us": "150000\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            1.5,
        ),
        ("4:cpu,cpuacct:/app\n", {"cpu/app/cpu.cfs_quota_us": "-1\n", "cpu/app/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpu:/app\n", {"cpu/app/cpu.cfs_quota_us": "150000\n"}, None),
        ("0::/app:1\n", {"app:1/cpu.max": "150000 100000\n"}, 1.5),
        (
            "4:cpuset:/app\n3:memory:/app\n",
            {"cpu/app/cpu.cfs_quota_us": "150000\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        (
            "4:cpu:/docker/abc\n0::/\n",
            {
                "cpu/cpu.cfs_quota_us": "300000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "cpu/docker/cpu.cfs_quota_us": "100000\n",
                "cpu/docker/cpu.cfs_period_us": "50000\n",
                "cpu.max": "max 100000\n",
            },
            2.0,
        ),
        ("", {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_the_smallest_quota_up_to_the_root_counts(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    assert _quota(*groups(tmp_path, membership, files)) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert _quota(tmp_path / "missing", tmp_path) is None


def test_usable_cores_are_within_the_affinity_mask() -> None:
    mask = os.sched_getaffinity(0)
    assert 1 <= usable_cores() <= len(mask)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_where_the_affinity_mask_is_forbidden_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", forbidden)
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
