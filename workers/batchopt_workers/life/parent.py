"""The end of a process with its parent, whatever it is doing then."""

from __future__ import annotations

import fcntl
import os
import signal
from multiprocessing.connection import wait

_F_SETSIG = 10  # Linux; Python does not name it


def tie(leash: int, group: int) -> None:
    """Have the kernel kill a group of processes when the other end of the pipe `leash` closes: this does not need the
    GIL, which the user's code may hold."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, -group)
    fcntl.fcntl(leash, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)


def end(code: int) -> None:
    """End this process and everything that it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def end_with(parent: int, leash: int) -> None:
    """Wait for the end of the process `parent`, or of the other end of the pipe `leash`, and end this process then."""
    watched = [leash]
    if hasattr(os, "pidfd_open"):  # another process may hold the other end
        try:
            watched.append(os.pidfd_open(parent))
        except ProcessLookupError:
            end(1)
        except OSError:  # not allowed in this container
            pass
    wait(watched)
    end(1)
