"""Processes whose parent has ended: on Linux one of their ancestors can have them as its own, and so can end them, even
those that have left the group and the session that they were started in."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

# Seconds that an orphan has to end by itself: Python's resource tracker removes what its process has left.
GRACE = 1.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on the orphans among this process's descendants are its children. Does nothing where there is no such
    thing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The children of this process, which has one thread; none where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


class Orphans:
    """Ends the children that a process did not start."""

    def __init__(self) -> None:
        """Those that are there already are not meant."""
        self._others = children()
        self._deadlines: dict[int, float] = {}

    def end(self, own: Collection[int]) -> bool:
        """End those that are not `own`, once they have had their time; to be called again as long as this returns True:
        some are left, or may have left others."""
        now = time.monotonic()
        for pid in children() - self._others - {*own}:
            if now >= self._deadlines.setdefault(pid, now + GRACE):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        left = bool(self._deadlines)
        for pid in list(self._deadlines):
            if has_ended(pid):
                del self._deadlines[pid]
        return left


def has_ended(pid: int) -> bool:
    """Whether that child is over; then it is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
