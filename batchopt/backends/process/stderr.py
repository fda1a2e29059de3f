"""A worker's standard error: copied to this process's, with its tail kept for error messages; warnings are issued here,
once each."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import re
import sys
import weakref
from contextlib import suppress

from batchopt_workers.wire.failures import BEGUN, MARKED, Warned
from batchopt_workers.wire.mapping import punch_hole
from batchopt_workers.wire.memory import anonymous_file

TAIL = 2**12  # characters shown in an error
_KEPT = 2**16  # bytes of which those are the last
_MODULES = re.compile(r"\nExtension modules: .*")  # after faulthandler's frames: kilobytes once SciPy is imported
_PIECE = 2**20  # bytes after which the memory of text that was passed on is released


class Stderr:
    """An anonymous file that is the standard error of one worker.

    A pipe would block a worker that writes more than is read; a file needs no thread that reads it, and has everything
    that was written up to the worker's death.
    """

    def __init__(self, warned: set[Warned] | None = None) -> None:
        """`warned`: the warnings that were issued before."""
        self.fd = anonymous_file()
        # Each write goes to the end, also if other processes have the file.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        self.writer = os.dup(self.fd)
        weakref.finalize(self, os.close, self.fd).atexit = False  # it is still read when workers end at exit
        self._passed_on = 0
        self._held, self._warned = "", set() if warned is None else warned
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
        self._tail = (self._tail + new)[-_KEPT:]
        before, self._passed_on = self._passed_on, self._passed_on + len(new)
        if self._passed_on // _PIECE > before // _PIECE:
            punch_hole(self.fd, 0, self._passed_on)  # not the end, where a worker may be writing
        text = self._held + self._decoder.decode(new)
        begun = BEGUN.search(text)
        text, self._held = (text, "") if begun is None else (text[: begun.start()], text[begun.start() :])
        plain = MARKED.sub("", text)
        if plain and sys.stderr is not None:
            with suppress(Exception):  # raised by the user's replacement of it
                print(plain, end="", file=sys.stderr, flush=True)
        found = {Warned(*json.loads(line)): None for line in MARKED.findall(text)}
        for warned in [warned for warned in found if warned not in self._warned]:
            self._warned.add(warned)
            warned.give()

    @property
    def tail(self) -> str:
        """The last lines that the worker wrote, if it wrote any."""
        text = MARKED.sub("", self._tail.decode("utf-8", "replace"))
        return _MODULES.sub("", text)[-TAIL:].strip()  # here, as they may come in two pieces
