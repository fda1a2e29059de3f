"""The end of a process with its parent, whatever it is doing then."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress
from multiprocessing.connection import wait

_F_SETSIG = 10  # Linux; Python does not name it


def tie(leash: int, group: int) -> None:
    """Have the kernel kill a group of processes when the other end of the pipe `leash` closes: this does not need the
    GIL, which the user's code may hold."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, -group)
    fcntl.fcntl(leash, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)


def end_with(parent: int, leash: int) -> None:
    """Wait for the end of the process `parent`, or of the other end of the pipe `leash`, and kill the group of this
    process then."""
    watched = [leash]
    with suppress(AttributeError, OSError):  # not on this system, or not allowed in this container
        watched.append(os.pidfd_open(parent))  # another process may hold the other end
    wait(watched)
    os.killpg(0, signal.SIGKILL)
