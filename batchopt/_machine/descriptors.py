"""Descriptors of files that child processes are given."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def apart_from_streams() -> Iterator[None]:
    """Keep descriptors opened in the body off the numbers of the standard streams, even if this process was started
    without some of these: a child has its own there."""
    taken = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            taken.append(fd)
        os.close(fd)
        yield
    finally:
        close_all(*taken)


def close_all(*fds: int) -> None:
    """Close each descriptor."""
    for fd in fds:
        os.close(fd)


def standard_output() -> int:
    """Return a descriptor of this process's current standard output; of /dev/null if it was started without one, since
    its number may then belong to something else."""
    if sys.__stdout__ is not None:
        with suppress(OSError):  # closed since
            return os.dup(1)
    return os.open(os.devnull, os.O_WRONLY)
