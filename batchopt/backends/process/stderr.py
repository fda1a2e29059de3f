"""What a worker writes to its standard error: passed on to ours, and its tail kept for error messages."""

from __future__ import annotations

import codecs
import fcntl
import os
import sys
import weakref
from contextlib import suppress

from batchopt_workers.mapping import give_back
from batchopt_workers.memory import anonymous_file

TAIL = 2**12  # bytes shown in an error
_PIECE = 2**20  # bytes after which the memory of what was passed on is given back


class Stderr:
    """An anonymous file that is the standard error of one worker.

    A pipe would block a worker that writes much while nobody reads; a file needs no thread to read it, and has what was
    written up to the last moment of a worker that dies.
    """

    def __init__(self) -> None:
        self.fd = anonymous_file()
        # One writer after the other, each at the end, whoever else has the file.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        self.writer = os.dup(self.fd)
        weakref.finalize(self, os.close, self.fd).atexit = False  # when workers end they are still read
        self._passed_on = 0
        self._tail = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def close_writer(self) -> None:
        """Close this process's copy of the writing end, once the worker has it."""
        os.close(self.writer)

    def pass_on(self) -> None:
        """Write what is new to this process's standard error."""
        size = os.fstat(self.fd).st_size
        if size <= self._passed_on:
            return
        new = os.pread(self.fd, size - self._passed_on, self._passed_on)
        self._tail = (self._tail + new)[-TAIL:]
        before, self._passed_on = self._passed_on, self._passed_on + len(new)
        if self._passed_on // _PIECE > before // _PIECE:
            give_back(self.fd, 0, self._passed_on)  # not what a worker may be writing at its end
        if sys.stderr is None:
            return
        with suppress(Exception):  # of whatever the user has put in place of it
            print(self._decoder.decode(new), end="", file=sys.stderr, flush=True)

    @property
    def tail(self) -> str:
        """The last lines that the worker wrote, if it wrote any."""
        return self._tail.decode("utf-8", "replace").strip()
