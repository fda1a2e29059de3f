"""A worker's standard error: passed on to ours as it is, and its tail kept."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt.backends.process.stderr import TAIL, Stderr

MUCH = 2**20  # once so much more was passed on, its memory is given back
PAGE = 2**12


class Worker:
    """Whoever writes to it, and this process's standard error."""

    def __init__(self, ours: pytest.CaptureFixture[str]) -> None:
        self.stderr, self._ours = Stderr(), ours

    def write(self, *pieces: bytes) -> None:
        """Each of them, and pass it on."""
        for data in pieces:
            assert os.write(self.stderr.writer, data) == len(data)
            self.stderr.pass_on()

    def size(self) -> int:
        """How many bytes of memory the file takes."""
        return os.fstat(self.stderr.fd).st_blocks * 512

    def passed_on(self) -> str:
        """What has come to our standard error since the last call, to the present."""
        self.stderr.pass_on()
        return self._ours.readouterr().err


@pytest.fixture
def worker(capsys: pytest.CaptureFixture[str]) -> Iterator[Worker]:
    worker = Worker(capsys)
    yield worker
    worker.stderr.close_writer()


def equal(text: str, expected: str) -> bool:
    """Of texts that are too long to be shown."""
    return text == expected


def test_what_was_written_is_passed_on_once(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.passed_on() == "" and worker.stderr.tail == ""
    os.write(worker.stderr.writer, b"one\n")
    os.write(worker.stderr.writer, b"two\n")
    other = Worker(capsys)  # which has a file of its own
    assert other.passed_on() == "" and other.stderr.tail == ""
    other.stderr.close_writer()
    assert worker.passed_on() == "one\ntwo\n"
    assert worker.passed_on() == ""
    worker.write(b"half a line")
    assert worker.passed_on() == "half a line"


def test_the_tail_is_what_was_passed_on_last_and_no_longer_than_is_useful(worker: Worker) -> None:
    os.write(worker.stderr.writer, b"first\nsecond\n\n")
    assert worker.stderr.tail == ""
    worker.stderr.pass_on()
    assert worker.stderr.tail == "first\nsecond"
    worker.write(b"third\n")
    assert worker.stderr.tail == "first\nsecond\n\nthird"
    for data, tail in (
        (b"a" * TAIL, "a" * TAIL),
        (b"b" * 10, "a" * (TAIL - 10) + "b" * 10),
        (b"c" * TAIL, "c" * TAIL),
    ):
        worker.write(data)
        assert worker.stderr.tail == tail


def test_much_is_passed_on_whole_and_the_file_does_not_grow_on(worker: Worker) -> None:
    for _ in range(3):
        worker.write(b"x" * MUCH + b"y")
        assert equal(worker.passed_on(), "x" * MUCH + "y")
        assert worker.size() <= PAGE
        assert worker.stderr.tail == "x" * (TAIL - 1) + "y"
        worker.write(b"more\n")
        assert worker.passed_on() == "more\n"
    assert worker.passed_on() == ""
    assert worker.stderr.tail.endswith("xymore")


@pytest.mark.parametrize(
    "pieces, text",
    [
        ([b"ab\xff\xfecd \xc3\xa9\n"], "ab\ufffd\ufffdcd \u00e9\n"),  # what is no text is marked
        ([b"\xe2\x82", b"\xac\n"], "\u20ac\n"),  # a character that comes in two pieces is one
    ],
)
def test_bytes_are_text(worker: Worker, pieces: list[bytes], text: str) -> None:
    worker.write(*pieces)
    assert worker.passed_on() == text
    assert worker.stderr.tail == text.rstrip()


class Broken(io.StringIO):
    """The reader of the pipe is gone, or the disk is full."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


# ---- warnings


class Unripe(UserWarning):
    """One of the user's."""


class Warns(nn.Module):
    """Warns in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for category in (RuntimeWarning, Unripe):
            warnings.warn(f"a {category.__name__}\nof two lines", category, stacklevel=1)
        found: torch.Tensor = self.inner(x)
        return found


def test_a_warning_of_workers_is_one_of_this_process_and_comes_once(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as found, BatchOptimizer(Warns(), parallelize=2, loss_fn=mean) as opt:
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
    with warnings.catch_warnings(), BatchOptimizer(Warns(), parallelize=2, loss_fn=mean) as opt:
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("ignore", Unripe)
        with pytest.raises(RuntimeWarning, match="of two lines"):
            opt.step(torch.ones(12, 3))
        assert opt.step(torch.ones(12, 3)) < 10


def mean(module: nn.Module, inputs: torch.Tensor, _: None) -> torch.Tensor:
    found: torch.Tensor = module(inputs).square().mean()
    return found


def test_a_warning_that_is_half_written_waits_for_its_rest(worker: Worker) -> None:
    line = b'\x1ebatchopt ["builtins", "UserWarning", "ripe", "file.py", 3]\x1e\n'
    worker.write(b"before\n" + line[:30])
    assert worker.passed_on() == "before\n"
    with pytest.warns(UserWarning, match="ripe"):
        worker.write(line[30:] + b"after\n")
    assert worker.passed_on() == "after\n"
    assert worker.stderr.tail == "before\nafter"
