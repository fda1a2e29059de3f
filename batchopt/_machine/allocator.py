"""The C library's allocator in this process: what an evaluation frees is kept for the next one.

glibc returns large blocks to the kernel when they are freed, so that each forward faults its pages in again: a third of
the time of a convolutional network. Here blocks of up to `LARGEST` are kept while something evaluates. Larger ones are
not: where several of them alternate, the gaps between those that are kept may take a multiple of the memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

# Bytes of the largest block that is kept, and that glibc allows here.
LARGEST = 2**25
# Parameters of `mallopt`: from which block size on memory is mapped for it alone; how much may be free at the heap's
# end; by how much the heap grows.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
_KEEPING = {_MMAP_THRESHOLD: LARGEST, _TRIM_THRESHOLD: -1, _TOP_PAD: 2**26}
# Those at which glibc itself arrives in a process that frees blocks of this size.
_USUAL = {_MMAP_THRESHOLD: LARGEST, _TRIM_THRESHOLD: 2 * LARGEST, _TOP_PAD: 2**17}

# Environment variables by which the user may have set them.
_VARIABLES = "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"

_keepers: list[None] = []  # without a lock: a finalizer may run in the middle, and a fork would inherit it


def keep_memory() -> None:
    """Keep what is freed, until `release_memory` was called as often; where the C library is not glibc, or the user has
    settings of their own, nothing changes."""
    _keepers.append(None)
    _apply(_KEEPING)


def release_memory() -> None:
    """Return what is free to the kernel, unless something else keeps it."""
    _keepers.pop()
    if not _keepers and _apply(_USUAL):
        ctypes.CDLL(None).malloc_trim(0)


def _apply(parameters: dict[int, int]) -> bool:
    mallopt = _mallopt()
    return mallopt is not None and all([mallopt(*pair) for pair in parameters.items()])


@cache
def _mallopt() -> Callable[[int, int], int] | None:
    if not os.environ.keys().isdisjoint(_VARIABLES):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
