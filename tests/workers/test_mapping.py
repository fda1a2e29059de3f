"""Memory that becomes private or shared where it is."""

from __future__ import annotations

import os

import pytest
import torch

from batchopt_workers.data import mapping
from batchopt_workers.data.memory import SharedBlock

PAGE = os.sysconf("SC_PAGESIZE")


def numbered(pages: int) -> tuple[SharedBlock, torch.Tensor]:
    """A block, and its memory: numbers from 0 on."""
    block = SharedBlock.create(pages * PAGE)
    block.copy_on_fork()
    tensor = block.tensor(torch.int32, (pages * PAGE // 4,))
    tensor.copy_(torch.arange(len(tensor)))
    return block, tensor


@pytest.mark.parametrize("pages", [1, 2, 7])
def test_private_memory_keeps_address_and_content(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_PIECE", 2 * PAGE)
    block, tensor = numbered(pages)
    file = os.dup(block.fd)
    block.make_private()
    assert os.fstat(file).st_blocks == 0  # nothing is kept twice
    os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(block.fd)
    assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32))
    tensor.fill_(-1)
    assert block.tensor(torch.int32, (1,)).item() == -1
    block.make_private()
    assert tensor.eq(-1).all()


def test_private_memory_may_be_shared_again() -> None:
    block, tensor = numbered(3)
    for expected in (5, 6):
        block.make_private()
        tensor.fill_(expected)
        block.make_shared()
        block.make_shared()
        theirs = SharedBlock(os.dup(block.fd)).tensor(torch.int32, (len(tensor),))
        assert theirs.eq(expected).all()
        theirs.fill_(-expected)
        assert tensor.eq(-expected).all()


def test_memory_that_is_private_from_the_start_may_be_shared() -> None:
    block = SharedBlock(-1, nbytes=3 * PAGE - 1)
    tensor = block.tensor(torch.uint8, (3 * PAGE,))
    assert not tensor.any()
    block.make_private()
    tensor.fill_(5)
    block.make_shared()
    theirs = SharedBlock(os.dup(block.fd)).tensor(torch.uint8, (3 * PAGE,))
    assert theirs.eq(5).all()
    tensor.fill_(6)
    assert theirs.eq(6).all()
    block.make_private()
    tensor.fill_(7)
    assert theirs.eq(0).all()  # its file was emptied


def test_without_memory_to_copy_to_it_is_private_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_PIECE", PAGE)
    copy, left = mapping._copy, iter([True, True])

    def scarce(address: int, nbytes: int) -> int:
        if not next(left, False):
            raise OSError("no memory")
        return copy(address, nbytes)

    monkeypatch.setattr(mapping, "_copy", scarce)
    block, tensor = numbered(5)
    file = SharedBlock(os.dup(block.fd)).tensor(torch.int32, (1,))
    block.make_private()
    assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32))
    tensor.fill_(9)
    assert file.item() == 0


def test_memory_that_nobody_views_is_forgotten() -> None:
    before = len(mapping._shared)
    block, tensor = numbered(1)
    assert len(mapping._shared) == before + 1
    del block
    assert len(mapping._shared) == before + 1
    del tensor
    assert len(mapping._shared) == before


def test_pages_that_were_written_show_the_file_no_more() -> None:
    block = SharedBlock.create(8 * PAGE)
    private = SharedBlock(os.dup(block.fd), private=True)
    ours, theirs = (each.tensor(torch.uint8, (8 * PAGE,)) for each in (private, block))

    def shows(first: int, last: int) -> bool:
        return mapping.shows_file(ours.data_ptr() + first, last - first)

    assert shows(0, 8 * PAGE)
    theirs[PAGE] = 7  # the file itself
    assert ours.sum() == 7 and shows(0, 8 * PAGE)
    ours[3 * PAGE + 5] = 1
    assert shows(0, 3 * PAGE) and shows(4 * PAGE, 8 * PAGE) and not shows(3 * PAGE, 3 * PAGE + 1)
    assert not shows(0, 8 * PAGE) and not shows(3 * PAGE - 1, 3 * PAGE + 1)
    private.discard()
    assert shows(0, 8 * PAGE)
    plain = torch.ones(PAGE)
    assert not mapping.shows_file(plain.data_ptr(), plain.nbytes)  # no file's


def test_a_call_that_fails_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate"):
        mapping._copy(0, 2**60)
