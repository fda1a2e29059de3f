"""The number of threads that torch uses in this process."""

from __future__ import annotations

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
