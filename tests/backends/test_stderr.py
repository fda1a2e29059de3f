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
    """Whoever writes to it."""

    def __init__(self) -> None:
        self.stderr = Stderr()

    def write(self, data: bytes) -> None:
        """All of it."""
        assert os.write(self.stderr.writer, data) == len(data)

    def size(self) -> int:
        """How many bytes of memory the file takes."""
        return os.fstat(self.stderr.fd).st_blocks * 512


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stderr.close_writer()


class Ours:
    """This process's standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def taken(self) -> str:
        """What was written there since the last call."""
        return self._capsys.readouterr().err


@pytest.fixture
def ours(capsys: pytest.CaptureFixture[str]) -> Ours:
    return Ours(capsys)


def equal(text: str, expected: str) -> bool:
    """Of texts that are too long to be shown."""
    return text == expected


def test_what_was_written_is_passed_on_once(worker: Worker, ours: Ours) -> None:
    worker.write(b"one\n")
    worker.write(b"two\n")
    worker.stderr.pass_on()
    assert ours.taken() == "one\ntwo\n"
    worker.stderr.pass_on()
    assert ours.taken() == ""
    worker.write(b"half a line")
    worker.stderr.pass_on()
    assert ours.taken() == "half a line"


def test_what_is_passed_on_is_seen_at_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(seen, "utf-8"))
    worker.write(b"half a line")
    worker.stderr.pass_on()
    assert seen.getvalue() == b"half a line"


def test_nothing_is_passed_on_of_a_worker_that_is_silent(worker: Worker, ours: Ours) -> None:
    worker.stderr.pass_on()
    assert ours.taken() == ""
    assert worker.stderr.tail == ""


def test_two_workers_have_a_file_each(worker: Worker, ours: Ours) -> None:
    other = Worker()
    worker.write(b"of one")
    other.stderr.pass_on()
    other.stderr.close_writer()
    assert ours.taken() == ""
    assert other.stderr.tail == ""


def test_the_tail_is_what_was_passed_on_last(worker: Worker, ours: Ours) -> None:
    worker.write(b"first\nsecond\n\n")
    assert worker.stderr.tail == ""
    worker.stderr.pass_on()
    assert worker.stderr.tail == "first\nsecond"
    worker.write(b"third\n")
    worker.stderr.pass_on()
    assert worker.stderr.tail == "first\nsecond\n\nthird"


def test_the_tail_is_no_longer_than_is_useful(worker: Worker, ours: Ours) -> None:
    worker.write(b"a" * TAIL)
    worker.stderr.pass_on()
    assert worker.stderr.tail == "a" * TAIL
    worker.write(b"b" * 10)
    worker.stderr.pass_on()
    assert worker.stderr.tail == "a" * (TAIL - 10) + "b" * 10
    worker.write(b"c" * TAIL)
    worker.stderr.pass_on()
    assert worker.stderr.tail == "c" * TAIL


def test_much_is_passed_on_whole_and_the_file_does_not_grow_on(worker: Worker, ours: Ours) -> None:
    worker.write(b"x" * MUCH + b"y")
    worker.stderr.pass_on()
    assert equal(ours.taken(), "x" * MUCH + "y")
    assert worker.size() <= PAGE
    assert worker.stderr.tail == "x" * (TAIL - 1) + "y"


def test_it_goes_on_after_memory_was_given_back(worker: Worker, ours: Ours) -> None:
    for _ in range(3):
        worker.write(b"x" * MUCH + b"y")
        worker.stderr.pass_on()
        ours.taken()
        worker.write(b"more\n")
        worker.stderr.pass_on()
        assert ours.taken() == "more\n"
    worker.stderr.pass_on()
    assert ours.taken() == ""
    assert worker.stderr.tail.endswith("xymore")


def test_many_small_pieces_do_not_pile_up(worker: Worker, ours: Ours) -> None:
    piece = b"z" * (MUCH // 8)
    for _ in range(40):
        worker.write(piece)
        worker.stderr.pass_on()
        assert worker.size() <= MUCH + len(piece)
    assert equal(ours.taken(), "z" * (40 * len(piece)))


def test_what_is_written_while_memory_is_given_back_is_passed_on(
    worker: Worker, ours: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread

    def meanwhile(fd: int, length: int, at: int) -> bytes:
        found = read(fd, length, at)
        worker.write(b"Traceback\n")
        monkeypatch.undo()
        return found

    worker.write(b"x" * MUCH + b"y")
    monkeypatch.setattr(os, "pread", meanwhile)
    worker.stderr.pass_on()
    worker.stderr.pass_on()
    assert ours.taken()[-11:] == "yTraceback\n"


def test_bytes_that_are_no_text_are_marked(worker: Worker, ours: Ours) -> None:
    worker.write(b"ab\xff\xfecd \xc3\xa9\n")
    worker.stderr.pass_on()
    assert ours.taken() == "ab\ufffd\ufffdcd \u00e9\n"
    assert worker.stderr.tail == "ab\ufffd\ufffdcd \u00e9"


def test_a_tail_that_begins_within_a_character_is_readable(worker: Worker, ours: Ours) -> None:
    worker.write("\u20ac".encode() * TAIL)
    worker.stderr.pass_on()
    assert set(worker.stderr.tail) == {"\u20ac", "\ufffd"}
    assert worker.stderr.tail.count("\u20ac") == TAIL // 3


def test_a_character_that_comes_in_two_pieces_is_one(worker: Worker, ours: Ours) -> None:
    for piece in (b"\xe2\x82", b"\xac\n"):
        worker.write(piece)
        worker.stderr.pass_on()
    assert ours.taken() == "\u20ac\n"


def test_where_there_is_no_standard_error_the_tail_is_kept(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    worker.write(b"why it ended\n")
    worker.stderr.pass_on()
    assert worker.stderr.tail == "why it ended"


def test_where_there_is_no_standard_error_nothing_goes_to_standard_output_instead(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", None)
    worker.write(b"why it ended\n")
    worker.stderr.pass_on()
    assert stdout.getvalue() == ""


def test_where_standard_error_is_closed_the_tail_is_kept(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    worker.write(b"why it ended\n")
    worker.stderr.pass_on()
    assert worker.stderr.tail == "why it ended"


class Sink:
    """All that `print(file=...)` needs of a file."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        """Keep it."""
        self.text += text

    def flush(self) -> None:
        """Nothing."""


def test_standard_error_may_be_anything_that_can_be_printed_to(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    monkeypatch.setattr(sys, "stderr", sink)
    worker.write(b"why it ended\n")
    worker.stderr.pass_on()
    assert sink.text == "why it ended\n"


class Broken(io.StringIO):
    """The reader of the pipe is gone, or the disk is full."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_standard_error_that_cannot_be_written_is_no_error_of_ours(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Broken())
    worker.write(b"why it ended\n")
    worker.stderr.pass_on()
    assert worker.stderr.tail == "why it ended"


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
    stderr.close_writer()
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_the_last_words_of_a_process_that_is_killed_are_read(ours: Ours) -> None:
    stderr = Stderr()
    with started(stderr, SAYS_AND_WAITS) as process:
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
    stderr.pass_on()
    assert ours.taken() == "written\nprinted\n"
    assert stderr.tail == "written\nprinted"


def test_a_process_that_lives_is_passed_on_already(ours: Ours) -> None:
    stderr = Stderr()
    with started(stderr, SAYS_AND_WAITS):
        stderr.pass_on()
        assert ours.taken() == "written\nprinted\n"


def test_a_process_that_writes_much_does_not_wait_for_a_reader(ours: Ours) -> None:
    stderr = Stderr()
    with started(stderr, "import os; print('ready', os.write(2, b'x' * 3_000_000) and '', sep='', flush=True)"):
        pass
    stderr.pass_on()
    assert equal(ours.taken(), "x" * 3_000_000)


def test_whoever_else_has_the_file_is_not_overwritten(worker: Worker, ours: Ours) -> None:
    worker.write(b"a" * MUCH)
    other = os.open(f"/dev/fd/{worker.stderr.writer}", os.O_WRONLY | os.O_APPEND)  # as /dev/stderr in the worker
    os.write(other, b"b")
    worker.write(b"c")
    worker.stderr.pass_on()
    assert worker.size() <= PAGE
    assert equal(ours.taken(), "a" * MUCH + "bc")
    os.write(other, b"d")
    worker.write(b"e")
    os.close(other)
    worker.stderr.pass_on()
    assert ours.taken() == "de"


def test_its_descriptor_is_closed_when_it_is_forgotten() -> None:
    stderr = Stderr()
    stderr.close_writer()
    fd = stderr.fd
    del stderr
    with pytest.raises(OSError):
        os.fstat(fd)


def test_no_other_process_inherits_it(worker: Worker) -> None:
    assert not os.get_inheritable(worker.stderr.fd)
    assert not os.get_inheritable(worker.stderr.writer)


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


def test_a_warning_that_is_half_written_waits_for_its_rest(worker: Worker, ours: Ours) -> None:
    line = b'\x1ebatchopt ["builtins", "UserWarning", "ripe", "file.py", 3]\x1e\n'
    worker.write(b"before\n" + line[:30])
    worker.stderr.pass_on()
    assert ours.taken() == "before\n"
    worker.write(line[30:] + b"after\n")
    with pytest.warns(UserWarning, match="ripe"):
        worker.stderr.pass_on()
    assert ours.taken() == "after\n"
    assert worker.stderr.tail == "before\nafter"
