"""The number of threads that torch uses in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Run with `count` intra-op threads, and leave the caller's number as it was; None changes nothing.

    After each use torch's threads spin for some milliseconds. While workers have all cores, or are about to have them,
    one thread is faster.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
