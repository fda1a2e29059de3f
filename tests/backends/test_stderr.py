"""A worker's standard error: passed on to ours as it is, and its tail kept; warnings are ours."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, Worker, WorkerLostError
from tests.workloads import size

MUCH = 2**20  # once so much more was passed on, its memory is given back
PAGE = 2**12


@pytest.fixture
def opt() -> Iterator[BatchOptimizer]:
    with BatchOptimizer(nn.Linear(3, 1), nn.MSELoss(), parallelize=2) as opt:
        yield opt


def write(opt: BatchOptimizer, *pieces: bytes) -> None:
    """The first worker does, each of them by itself; it is passed on when something has been asked of a batch."""
    for piece in pieces:
        opt.run_on_workers(lambda worker, data: os.write(2, data) if worker.rank == 0 else 0, piece)
        opt.predict(torch.ones(4, 3))


@pytest.mark.parametrize(
    "pieces, text",
    [
        ([b"one\n", b"two\n", b"half a line"], "one\ntwo\nhalf a line"),
        ([b"ab\xff\xfecd \xc3\xa9\n"], "ab\ufffd\ufffdcd \u00e9\n"),  # what is no text is marked
        ([b"\xe2\x82", b"\xac\n"], "\u20ac\n"),  # a character that comes in two pieces is one
    ],
)
def test_what_was_written_is_passed_on_once(
    opt: BatchOptimizer, capfd: pytest.CaptureFixture[str], pieces: list[bytes], text: str
) -> None:
    write(opt, *pieces)
    assert capfd.readouterr().err == text
    write(opt, b"more\n")
    assert capfd.readouterr().err == "more\n"


def test_much_is_passed_on_whole_and_the_file_does_not_grow_on(
    opt: BatchOptimizer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        write(opt, b"x" * MUCH + b"y")
        found = capfd.readouterr().err
        assert len(found) == MUCH + 1 and set(found[:-1]) == {"x"} and found[-1] == "y"
        assert os.stat(f"/proc/{opt.workers[0].pid}/fd/2").st_blocks * 512 <= PAGE


@pytest.mark.rows
@pytest.mark.parametrize(
    "written, tail",
    [
        (["first\n", "second\n\n"], "first\nsecond"),
        (["a" * 10**4, "b" * 10], "a" * 1000 + "b" * 10),
        (["frames\n\nExtension modules: one", ", two" * 2000 + "\n"], "frames"),  # faulthandler's, in two pieces
    ],
)
def test_an_error_has_what_was_written_last(opt: BatchOptimizer, written: list[str], tail: str) -> None:
    def die(worker: Worker, last: str) -> None:
        if worker.rank == 0:
            print(last, file=sys.stderr, end="", flush=True)
            os._exit(0)

    write(opt, *(text.encode() for text in written[:-1]))
    with pytest.raises(WorkerLostError, match=r"batchopt-worker-0.* exited with code 0 while running a func") as lost:
        opt.run_on_workers(die, written[-1])
    assert str(lost.value).endswith(tail) and len(str(lost.value)) < 6000
    assert opt.run_on_workers(lambda worker: worker.rank) == [0, 1]
    assert [worker.restarts for worker in opt.workers] == [1, 0]


class Unripe(UserWarning):
    """One of the user's."""


class Warns(nn.Linear):
    """Warns in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for category in (RuntimeWarning, Unripe):
            warnings.warn(f"a {category.__name__}\nof two lines", category, stacklevel=1)
        return super().forward(x)


def test_a_warning_of_workers_is_one_of_this_process_and_comes_once(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as found, BatchOptimizer(Warns(3, 1), parallelize=2, loss_fn=size) as opt:
        warnings.simplefilter("always")
        opt.step(torch.ones(12, 3))
        opt.step(torch.ones(12, 3))
        assert {(str(w.message), w.category, w.filename == __file__) for w in found} == {
            ("a RuntimeWarning\nof two lines", RuntimeWarning, True),
            ("a Unripe\nof two lines", Unripe, True),
        }
    assert len(found) == 2
    assert "warn" not in capfd.readouterr().err.lower()


def test_a_warning_that_is_an_error_here_is_raised_and_the_workers_can_be_used_on() -> None:
    with warnings.catch_warnings(), BatchOptimizer(Warns(3, 1), parallelize=2, loss_fn=size) as opt:
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("ignore", Unripe)
        with pytest.raises(RuntimeWarning, match="of two lines"):
            opt.step(torch.ones(12, 3))
        assert opt.step(torch.ones(12, 3)) < 10


def test_a_warning_that_is_half_written_waits_for_its_rest(
    opt: BatchOptimizer, capfd: pytest.CaptureFixture[str]
) -> None:
    line = b'\x1ebatchopt ["builtins", "UserWarning", "ripe", "file.py", 3]\x1e\n'
    write(opt, b"before\n" + line[:30])
    assert capfd.readouterr().err == "before\n"
    with pytest.warns(UserWarning, match="ripe"):
        write(opt, line[30:] + b"after\n")
    assert capfd.readouterr().err == "after\n"
