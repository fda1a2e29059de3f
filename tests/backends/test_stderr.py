"""A worker's standard error: passed on to ours as it is, and its tail kept."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

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


def test_what_is_passed_on_is_seen_at_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(seen, "utf-8"))
    worker.write(b"half a line")
    assert seen.getvalue() == b"half a line"


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


def test_many_small_pieces_do_not_pile_up(worker: Worker) -> None:
    piece = b"z" * (MUCH // 8)
    for _ in range(40):
        worker.write(piece)
        assert worker.size() <= MUCH + len(piece)
    assert equal(worker.passed_on(), "z" * (40 * len(piece)))


def test_what_is_written_while_memory_is_given_back_is_passed_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread

    def meanwhile(fd: int, length: int, at: int) -> bytes:
        found = read(fd, length, at)
        os.write(worker.stderr.writer, b"Traceback\n")
        monkeypatch.undo()
        return found

    monkeypatch.setattr(os, "pread", meanwhile)
    worker.write(b"x" * MUCH + b"y")
    assert worker.passed_on()[-11:] == "yTraceback\n"


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


def test_a_tail_that_begins_within_a_character_is_readable(worker: Worker) -> None:
    worker.write("\u20ac".encode() * TAIL)
    assert set(worker.stderr.tail) == {"\u20ac", "\ufffd"}
    assert worker.stderr.tail.count("\u20ac") == TAIL // 3


class Sink:
    """All that `print(file=...)` needs of a file."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        """Keep it."""
        self.text += text

    def flush(self) -> None:
        """Nothing."""


class Broken(io.StringIO):
    """The reader of the pipe is gone, or the disk is full."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("kind", ["none", "closed", "broken", "anything that can be printed to"])
def test_the_tail_is_kept_whatever_our_standard_error_is(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    closed, sink, stdout = io.StringIO(), Sink(), io.StringIO()
    closed.close()
    stderr = {"none": None, "closed": closed, "broken": Broken()}.get(kind, sink)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    worker.write(b"why it ended\n")
    assert worker.stderr.tail == "why it ended"
    assert stdout.getvalue() == ""  # it does not go there instead
    assert sink.text == ("why it ended\n" if stderr is sink else "")


SAYS_AND_WAITS = """
import os, sys
os.write(2, b"written\\n")
sys.stderr.write("printed\\n")
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def started(stderr: Stderr, code: str) -> subprocess.Popen[bytes]:
    """A process with that standard error, which has gone as far as saying a line."""
    arguments: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr.writer}
    process = subprocess.Popen([sys.executable, "-S", "-c", code], **arguments)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("lives", [True, False])
def test_the_words_of_a_process_are_read_while_it_lives_and_after_it_was_killed(worker: Worker, lives: bool) -> None:
    with started(worker.stderr, SAYS_AND_WAITS) as process:
        if not lives:
            process.kill()
            assert process.wait(10) == -signal.SIGKILL
        assert worker.passed_on() == "written\nprinted\n"
        assert worker.stderr.tail == "written\nprinted"


def test_a_process_that_writes_much_does_not_wait_for_a_reader(worker: Worker) -> None:
    with started(worker.stderr, "import os; print('ready', os.write(2, b'x' * 3_000_000) and '', sep='', flush=True)"):
        pass
    assert equal(worker.passed_on(), "x" * 3_000_000)


def test_whoever_else_has_the_file_is_not_overwritten(worker: Worker) -> None:
    os.write(worker.stderr.writer, b"a" * MUCH)
    other = os.open(f"/dev/fd/{worker.stderr.writer}", os.O_WRONLY | os.O_APPEND)  # as /dev/stderr in the worker
    os.write(other, b"b")
    worker.write(b"c")
    assert worker.size() <= PAGE
    assert equal(worker.passed_on(), "a" * MUCH + "bc")
    os.write(other, b"d")
    os.write(worker.stderr.writer, b"e")
    os.close(other)
    assert worker.passed_on() == "de"


def test_its_descriptors_are_not_inherited_and_closed_when_it_is_forgotten() -> None:
    stderr = Stderr()
    assert not os.get_inheritable(stderr.fd) and not os.get_inheritable(stderr.writer)
    stderr.close_writer()
    fd = stderr.fd
    del stderr
    with pytest.raises(OSError):
        os.fstat(fd)


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
