"""Rows go to where their samples are, in a file of memory or in tensors, or there is an error that says why not."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from batchopt.backends.process.task_files import read_columns
from batchopt_workers.data import memory
from batchopt_workers.data.memory import GrowingFile, anonymous_file
from batchopt_workers.tasks import forms
from batchopt_workers.tasks.forms import FileOutput, MemoryOutput, Output, rows_form
from tests.workers.test_memory import limited

ROWS = {
    "plain": torch.arange(21.0).view(7, 3),
    "turned": torch.arange(14, dtype=torch.int16).view(2, 7).t(),
    "complex": torch.arange(7.0).to(torch.complex64).conj(),
    "no width": torch.zeros(7, 0),
    "expanded": torch.ones(7, 1, dtype=torch.bfloat16).expand(7, 4),
}


def write(to: Output) -> tuple[object, int]:
    """In two chunks, the later one first; the columns, and how many samples there are."""
    for start, stop in ((4, 7), (0, 4)):
        form, tensors = rows_form({key: rows[start:stop] for key, rows in ROWS.items()}, stop - start)
        to.write(form.columns, tensors, start, stop, 7)
    return form, 7


@pytest.mark.parametrize("copied", [False, True])
def test_a_file_has_the_rows_of_all_who_write_to_it(copied: bool) -> None:
    file = GrowingFile()
    form, samples = write(FileOutput(os.dup(file.fd)))
    found = form.filled(read_columns(file, form.columns, samples, copied))  # type: ignore[attr-defined]
    assert found.keys() == ROWS.keys() and all(torch.equal(found[key], rows) for key, rows in ROWS.items())


def test_memory_of_this_process_has_them_too() -> None:
    to = MemoryOutput()
    form, _ = write(to)
    assert all(map(torch.equal, to.tensors, ROWS.values()))
    assert [tuple(column.shape) for column in form.columns] == [(3,), (2,), (), (0,), (4,)]  # type: ignore[attr-defined]


def large(file: GrowingFile, copied: bool = False) -> torch.Tensor:
    form, tensors = rows_form(torch.ones(100, 1000), 100)
    FileOutput(os.dup(file.fd)).write(form.columns, tensors, 0, 100, 100)
    (found,) = read_columns(file, form.columns, 100, copied)
    return found


def test_what_is_written_to_the_result_stays_in_this_process() -> None:
    file = GrowingFile()
    one, other = large(file), large(file)
    one.zero_()
    assert other.sum() == 100_000


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "free_memory", lambda: 2**20)
    to = FileOutput(anonymous_file())
    form, tensors = rows_form(torch.zeros(1000, 1000), 1000)
    with pytest.raises(MemoryError, match=r"4.0 MB are needed for what the function returned, and 1.0 MB are free"):
        to.write(form.columns, tensors, 0, 1000, 1000)
    small, tensors = rows_form(torch.zeros(10, 10), 10)
    to.write(small.columns, tensors, 0, 10, 10)


def test_limits_of_this_process_are_named() -> None:
    form, tensors = rows_form(torch.zeros(1000, 1000), 1000)
    file = GrowingFile()
    to = FileOutput(os.dup(file.fd))
    with limited(resource.RLIMIT_FSIZE, 2**20):
        with pytest.raises(OSError, match=r"may have no more than 1048576: raise the limit \(`ulimit -f`\)"):
            to.write(form.columns, tensors, 0, 1000, 1000)
        with pytest.raises(OSError, match="ulimit -f"):
            read_columns(file, form.columns, 1000, False)
    to.write(form.columns, tensors, 0, 1000, 1000)
    with limited(resource.RLIMIT_NOFILE, 3):
        with pytest.raises(OSError, match="ulimit -n"):
            GrowingFile()
        assert read_columns(file, form.columns, 1000, False)[0].sum() == 0


def test_a_block_that_cannot_be_mapped_gives_its_descriptor_back() -> None:
    block = memory.SharedBlock.create(100)
    opened = len(os.listdir("/proc/self/fd"))
    fd = os.dup(block.fd)
    with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(OSError, match="ulimit -n"):
        memory.SharedBlock(fd)
    assert len(os.listdir("/proc/self/fd")) == opened
