"""Shared memory, and how much of it is said to be free, from files as the kernel writes them."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchopt_workers.wire import memory
from batchopt_workers.wire.mapping import free_memory
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.packing import dumps, pack, unpack


def descriptors() -> list[str]:
    """The open descriptors of this process, without those that only wait for the garbage collector."""
    gc.collect()
    return os.listdir("/proc/self/fd")


@pytest.fixture
def all_closed() -> Iterator[None]:
    """The test leaves no descriptor."""
    before = descriptors()
    yield
    assert descriptors() == before


@contextmanager
def limited(what: int, number: int) -> Iterator[None]:
    """Under a limit of this process."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.usefixtures("all_closed")
def test_a_limit_of_the_length_of_files_is_named() -> None:
    with (
        limited(resource.RLIMIT_FSIZE, 2**20),
        pytest.raises(OSError, match=r"files of this process may have no more than 1048576: raise .*`ulimit -f`"),
    ):
        SharedBlock.create(2_000_000)


@pytest.mark.usefixtures("all_closed")
def test_more_than_is_free_is_a_memory_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 64_000_000)
    with pytest.raises(MemoryError) as caught:
        SharedBlock.create(812_000_000)
    assert str(caught.value) == (
        "812.0 MB of shared memory are needed and 64.0 MB are free: use a smaller batch, fewer workers, or give the "
        "machine or the container more memory"
    )
    assert SharedBlock.create(64_000_000).nbytes == 64_000_000
    monkeypatch.setattr(memory, "free_memory", lambda: None)  # unknown
    assert SharedBlock.create(1).nbytes > 0
    with pytest.raises(MemoryError, match=r"MB of shared memory are needed: use a smaller batch"):
        SharedBlock.create(2**63)


@pytest.mark.parametrize("spare", [0, 1], ids=["none", "one"])
def test_no_descriptor_left_is_an_os_error_with_the_limit(spare: int) -> None:
    """A block needs two descriptors: its own, and that of its mapping."""
    limit = max(map(int, descriptors())) + 8
    taken = []
    with limited(resource.RLIMIT_NOFILE, limit):
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(spare):
            os.close(taken.pop())
        words = rf"this process may have no more than {limit}: raise .*`ulimit -n`"
        with pytest.raises(OSError, match=words) as caught:
            SharedBlock.create(1)
    for descriptor in taken:
        os.close(descriptor)
    assert caught.value.errno == errno.EMFILE
    assert SharedBlock.create(1).nbytes > 0


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files cannot be sealed here")
def test_nobody_can_take_memory_away() -> None:
    block = SharedBlock.create(10_000)
    for length in (0, block.nbytes - 1, block.nbytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, length)
    block.tensor(torch.uint8, (block.nbytes,)).fill_(1)


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_system_that_forbids_shared_memory_is_named(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's profile does: it cannot be set up here for one test."""

    def forbidden(*arguments: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, call, forbidden)
    with pytest.raises(OSError, match=r"does not let the process make shared memory .*memfd_create, fallocate"):
        SharedBlock.create(1)


# ---- what is free

MEMINFO = """MemTotal:       24684084 kB
MemFree:        10000000 kB
MemAvailable:   12000000 kB
SwapTotal:       2000000 kB
SwapFree:        1000000 kB
HugePages_Total:       0
"""
MACHINE = 13_000_000 * 1024
SWAP = 1_000_000 * 1024


def version_2(limit: str, current: str = "600\n") -> dict[str, str]:
    stat = "anon 500\ninactive_file 60\nactive_file 40\nslab 7\n"
    return {"memory.max": limit, "memory.current": current, "memory.stat": stat}


def version_1(limit: int) -> dict[str, str]:
    return {
        "memory/memory.limit_in_bytes": f"{limit}\n",
        "memory/memory.usage_in_bytes": "600\n",
        "memory/memory.stat": "cache 70\ninactive_file 1\ntotal_inactive_file 60\ntotal_active_file 40\n",
    }


@pytest.mark.parametrize(
    "meminfo, group, free",
    [
        (MEMINFO, {}, MACHINE),
        ("MemAvailable: 5 kB\n", {}, 5 * 1024),  # no swap
        *((text, version_2("1000\n"), None) for text in (None, "MemFree: 1 kB\n", "MemAvailable: none\n")),
        # in a container: what is below its limit, and what only caches
        (MEMINFO, version_2("1000\n"), 1000 - 600 + 100 + SWAP),
        (MEMINFO, version_1(1000), 1000 - 600 + 100 + SWAP),
        (MEMINFO, version_2("400\n"), SWAP),  # it is over its limit
        # without a limit, or where it is not known
        (MEMINFO, version_2("max\n"), MACHINE),
        (MEMINFO, version_1(9223372036854771712), MACHINE),
        (MEMINFO, version_2("400\n", "unreadable\n"), MACHINE),
    ],
)
def test_what_is_free(tmp_path: Path, meminfo: str | None, group: dict[str, str], free: int | None) -> None:
    for name, text in {"meminfo": meminfo, **{f"cgroup/{name}": text for name, text in group.items()}}.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert free_memory(tmp_path / "meminfo", tmp_path / "cgroup") == free


# ---- what is packed in it


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4))
@settings(deadline=None)
def test_a_dense_tensor_keeps_its_strides_whatever_the_order_of_its_dimensions(
    order: list[int], shape: list[int]
) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(order)
    for sent in (tensor, nn.Parameter(tensor)):
        packed = pack(sent)
        block = SharedBlock.create(packed.nbytes)
        packed.place(block)
        found = unpack(packed.data, packed.placements, block, ())
        assert type(found) is type(sent) and found.stride() == tensor.stride() and torch.equal(found, tensor)


@pytest.mark.parametrize("send", [pack, dumps])
def test_a_tensor_on_an_accelerator_is_not_sent(send: Callable[[Any], object]) -> None:
    with FakeTensorMode():
        there = torch.ones(2, device="cuda")
    with pytest.raises(TypeError, match=r"a tensor is on cuda:0, and workers run on cpu: call \.cpu\(\) on it"):
        send({"a": there})
