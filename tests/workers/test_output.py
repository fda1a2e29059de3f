"""Rows go to where their samples are, in a file of memory or in tensors, or there is an error that says why not."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from batchopt.backends.process.task_files import ResultFile
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


@pytest.mark.parametrize("late", [False, True])
def test_a_file_has_the_rows_of_all_who_write_to_it(late: bool) -> None:
    file = ResultFile()
    form, samples = write(output(file))
    found = form.filled(file.read(form.columns, samples, late))  # type: ignore[attr-defined]
    assert found.keys() == ROWS.keys() and all(torch.equal(found[key], rows) for key, rows in ROWS.items())


def test_memory_of_this_process_has_them_too() -> None:
    to = MemoryOutput()
    form, _ = write(to)
    assert all(map(torch.equal, to.tensors, ROWS.values()))
    assert [tuple(column.shape) for column in form.columns] == [(3,), (2,), (), (0,), (4,)]  # type: ignore[attr-defined]


def output(file: ResultFile) -> FileOutput:
    return FileOutput(os.dup(file.file.fd)).begun()


def large(file: ResultFile, value: float = 1.0, late: bool = False, rows: int = 1000) -> torch.Tensor:
    """The result that a worker writes there."""
    form, tensors = rows_form(torch.full((rows, 1000), value), rows)
    file.begin()
    output(file).write(form.columns, tensors, 0, rows, rows)
    (found,) = file.read(form.columns, rows, late)
    return found


def test_what_is_written_to_the_result_stays_in_this_process() -> None:
    file = ResultFile()
    one = large(file)
    other = file.read(rows_form(one, 1000)[0].columns, 1000, False)[0]
    one.zero_()
    assert other.sum() == 1_000_000


def test_a_file_is_written_again_once_nobody_sees_its_pages() -> None:
    file = ResultFile()
    assert not file.is_free  # a worker may be writing
    found = large(file)[5:]
    assert not file.is_free
    pages = large(file, late=True)  # a copy, but the late worker goes on writing
    assert torch.equal(pages, torch.ones_like(pages)) and not file.is_free
    del found, pages
    for rows in (1000, 10, 1500, 300):  # shorter and longer than what is there
        found = large(file, rows + 0.5, rows=rows)
        assert torch.equal(found, torch.full((rows, 1000), rows + 0.5)) and (rows < 300 or not file.is_free)
        del found
        assert file.is_free


def test_a_file_that_a_forked_process_sees_is_not_written_again() -> None:
    file = ResultFile()
    found = large(file)
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.read(wait, 1)
        os._exit(0 if found.numpy().sum() == 1_000_000 else 1)  # torch may have had threads
    os.close(wait)
    try:
        del found
        assert not file.is_free
    finally:
        os.close(go)
        assert os.waitpid(child, 0)[1] == 0
    large(file)
    assert file.is_free


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
    file = ResultFile()
    to = output(file)
    with limited(resource.RLIMIT_FSIZE, 2**20):
        with pytest.raises(OSError, match=r"may have no more than 1048576: raise the limit \(`ulimit -f`\)"):
            to.write(form.columns, tensors, 0, 1000, 1000)
        with pytest.raises(OSError, match="ulimit -f"):
            file.read(form.columns, 1000, False)
    to.write(form.columns, tensors, 0, 1000, 1000)
    with limited(resource.RLIMIT_NOFILE, 3):
        with pytest.raises(OSError, match="ulimit -n"):
            GrowingFile()
        assert file.read(form.columns, 1000, False)[0].sum() == 0


def test_a_block_that_cannot_be_mapped_gives_its_descriptor_back() -> None:
    block = memory.SharedBlock.create(100)
    opened = len(os.listdir("/proc/self/fd"))
    fd = os.dup(block.fd)
    with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(OSError, match="ulimit -n"):
        memory.SharedBlock(fd)
    assert len(os.listdir("/proc/self/fd")) == opened
