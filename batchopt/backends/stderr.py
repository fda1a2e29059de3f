"""What a worker writes to its standard error: passed on to ours, and its tail kept for error messages."""

from __future__ import annotations

import os
import sys
import tempfile
import weakref

TAIL = 2**12  # bytes shown in an error
_LARGEST = 2**20  # bytes kept before the file is emptied


class Stderr:
    """An anonymous file that is the standard error of one worker.

    A pipe would block a worker that writes much while nobody reads; a file needs no thread to read it, and has what was
    written up to the last moment of a worker that dies.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("batchopt-stderr", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        # One writer after the other, each at the end, also after the file was emptied.
        self.writer = os.open(f"/dev/fd/{self.fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False  # when workers end they are still read
        self._passed_on = 0
        self._tail = b""

    def close_writer(self) -> None:
        """Once the worker has it."""
        os.close(self.writer)

    def pass_on(self) -> None:
        """Write what is new to this process's standard error."""
        size = os.fstat(self.fd).st_size
        if size <= self._passed_on:
            return
        new = os.pread(self.fd, size - self._passed_on, self._passed_on)
        self._passed_on += len(new)
        self._tail = (self._tail + new)[-TAIL:]
        if self._passed_on > _LARGEST:
            os.ftruncate(self.fd, 0)
            self._passed_on = 0
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.write(new.decode("utf-8", "replace"))
            sys.stderr.flush()

    @property
    def tail(self) -> str:
        """The last lines that the worker wrote, if it wrote any."""
        return self._tail.decode("utf-8", "replace").strip()
