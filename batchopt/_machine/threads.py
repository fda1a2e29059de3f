"""Numbers of torch's threads, and OpenMP threads that spin after their work."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch


class torch_threads:
    """Run with `count` intra-op threads, and restore the caller's number afterwards; None changes nothing.

    After each use torch's threads spin for some milliseconds. While workers use all cores, or are about to, one thread
    is faster.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._count is not None and self._count != self._before:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count is not None and self._count != self._before:
            torch.set_num_threads(self._before)


# Lets `omp_pause_resource_all` release threads, but no settings of the program.
_SOFT = 1


def end_spinning() -> None:
    """End the OpenMP threads that this thread has used; its next parallel region starts new ones, in 50 us.

    Each thread of the program has its own, so no other one is disturbed. Takes less than a microsecond if there are
    none. Does nothing without GNU OpenMP, which torch for Linux uses.
    """
    for pause in _pauses():
        pause(_SOFT)


@cache
def _pauses() -> list[Any]:
    """Return `omp_pause_resource_all` of each copy of libgomp in this process."""
    try:
        paths = re.findall(r" (/\S*/libgomp\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        functions: list[Any] = [ctypes.CDLL(path).omp_pause_resource_all for path in dict.fromkeys(paths)]
    except (OSError, AttributeError):  # another system, or a libgomp older than OpenMP 5
        return []
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
    return functions
