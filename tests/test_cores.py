"""Usable cores: the affinity mask, and the CPU quota of control groups, version 1 and 2."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchopt._machine.cores import _pauses, _quota, end_spinning, share_cores, usable_cores
from tests.building import Child, loaded


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
        (
            "0::/pod/app\n",
            {"pod/app/cpu.max": "400000 100000\n", "pod/cpu.max": "300000 200000\n", "cpu.max": "max 100000\n"},
            1.5,
        ),
        ("0::/host/path/unseen/inside\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/app\n", {"app/cpu.max": "garbage\n"}, None),
        (
            "4:cpu,cpuacct:/app\n",
            {"cpu/app/cpu.cfs_quota_us": "150000\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            1.5,
        ),
        ("4:cpu,cpuacct:/app\n", {"cpu/app/cpu.cfs_quota_us": "-1\n", "cpu/app/cpu.cfs_period_us": "100000\n"}, None),
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


@pytest.mark.parametrize("cores, workers, threads", [(7, 2, [4, 3]), (8, 4, [2, 2, 2, 2]), (2, 3, [1, 1, 1])])
def test_cores_are_divided_among_workers(
    cores: int, workers: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchopt._machine.cores.usable_cores", lambda: cores)
    assert share_cores(workers, None) == threads


# ---- OpenMP's threads end before workers compute, and nothing else does


def of_openmp(test: Any) -> Any:
    """Several threads, of a library that can be told to end them."""
    given = pytest.mark.usefixtures("two_threads")(test)
    return pytest.mark.skipif(not _pauses(), reason="there is no libgomp in this process")(given)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    end_spinning()


def compute() -> torch.Tensor:
    """In parallel."""
    return torch.arange(1_000_000, dtype=torch.float64).sqrt()


def gone(count: int) -> bool:
    """Whether there are as few threads soon: they end by themselves once they are told to."""
    waited = threading.Event()
    for _ in range(1000):
        if threads() <= count:
            return True
        waited.wait(0.01)
    return False


@of_openmp
def test_they_end_where_workers_evaluate() -> None:
    with loaded(torch.nn.Linear(2, 1), torch.nn.MSELoss(), torch.ones(4, 2), torch.ones(4, 1), parallelize=2) as opt:
        end_spinning()
        loss = opt.evaluate()
        compute()
        before = threads()
        assert torch.equal(opt.evaluate(), loss)
        assert gone(before - 2)


@of_openmp
def test_a_fork_does_not_wait_for_threads_that_it_does_not_have() -> None:
    compute()
    assert Child(end_spinning).said() == "None"
