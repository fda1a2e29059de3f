from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchopt_workers.data import memory
from batchopt_workers.data.memory import ALIGNMENT, SharedBlock, aligned


def descriptors() -> list[str]:
    """The open descriptors of this process, without those that only wait for the garbage collector."""
    gc.collect()
    return os.listdir("/proc/self/fd")


@given(st.integers(0, 2**40))
def test_aligned_is_the_next_multiple_of_the_alignment(nbytes: int) -> None:
    assert aligned(nbytes) % ALIGNMENT == 0
    assert nbytes <= aligned(nbytes) < nbytes + ALIGNMENT


@given(st.integers(0, 100_000))
@settings(deadline=None, max_examples=30)
def test_a_new_block_holds_what_was_asked_for_and_is_zero(nbytes: int) -> None:
    block = SharedBlock.create(nbytes)
    assert block.nbytes >= max(nbytes, 1)
    assert not block.tensor(torch.uint8, (block.nbytes,)).any()


def test_two_mappings_of_one_descriptor_are_the_same_memory() -> None:
    block = SharedBlock.create(64)
    other = SharedBlock(os.dup(block.fd))
    block.tensor(torch.float32, (4,)).copy_(torch.arange(4.0))
    assert other.nbytes == block.nbytes
    assert other.tensor(torch.float32, (2, 2)).tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_tensor_views_the_bytes_from_its_offset_on() -> None:
    block = SharedBlock.create(64)
    block.tensor(torch.int64, (2,), offset=16).fill_(-1)
    assert block.tensor(torch.uint8, (64,)).tolist() == [0] * 16 + [255] * 16 + [0] * 32


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_empty_tensor_needs_no_room(shape: tuple[int, ...]) -> None:
    block = SharedBlock.create(1)
    tensor = block.tensor(torch.float64, shape, offset=block.nbytes)
    assert tensor.shape == shape
    assert tensor.dtype is torch.float64


def test_a_tensor_past_the_end_is_refused() -> None:
    block = SharedBlock.create(1)
    with pytest.raises(ValueError, match="buffer length"):
        block.tensor(torch.uint8, (block.nbytes + 1,))


def test_a_tensor_keeps_the_memory_when_the_block_is_gone() -> None:
    block = SharedBlock.create(64)
    other = SharedBlock(os.dup(block.fd))
    tensor = block.tensor(torch.float32, (3,))
    block.release()
    del block
    tensor.fill_(7.0)
    assert other.tensor(torch.float32, (3,)).tolist() == [7.0, 7.0, 7.0]


def test_release_closes_the_descriptor_and_may_be_called_twice() -> None:
    block = SharedBlock.create(1)
    block.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(block.fd)
    block.release()


def test_a_block_that_nobody_holds_leaves_no_descriptor() -> None:
    before = descriptors()
    block = SharedBlock.create(1)
    assert len(descriptors()) > len(before)
    del block
    assert descriptors() == before


def test_programs_that_are_started_do_not_inherit_the_descriptor() -> None:
    assert not os.get_inheritable(SharedBlock.create(1).fd)


def test_a_size_that_no_machine_has_is_a_memory_error_and_leaves_no_descriptor() -> None:
    before = descriptors()
    with pytest.raises(MemoryError, match="MB of shared memory"):
        SharedBlock.create(2**63)
    assert descriptors() == before


def test_a_limit_of_the_length_of_files_is_named_and_no_descriptor_left() -> None:
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match=r"files of this process may have no more than 1048576: raise .*`ulimit -f`"):
            SharedBlock.create(2_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert descriptors() == before


def test_more_than_is_free_is_a_memory_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(memory, "free_memory", lambda: 64_000_000)
    with pytest.raises(MemoryError) as caught:
        SharedBlock.create(812_000_000)
    assert str(caught.value) == (
        "812.0 MB of shared memory are needed and 64.0 MB are free: use a smaller batch, fewer workers, or give the "
        "machine or the container more memory"
    )
    assert SharedBlock.create(64_000_000).nbytes == 64_000_000
    assert descriptors() == before


def test_what_is_free_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    assert SharedBlock.create(1).nbytes > 0
    with pytest.raises(MemoryError, match=r"MB of shared memory are needed: use a smaller batch"):
        SharedBlock.create(2**63)


@pytest.mark.parametrize("spare", [0, 1], ids=["none", "one"])
def test_no_descriptor_left_is_an_os_error_with_the_limit(spare: int) -> None:
    """A block needs two descriptors: its own, and that of its mapping."""
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 8
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(spare):
            os.close(taken.pop())
        with pytest.raises(
            OSError, match=rf"this process may have no more than {limit}: raise .*`ulimit -n`"
        ) as caught:
            SharedBlock.create(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
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
