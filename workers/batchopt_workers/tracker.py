"""Python's resource tracker, which removes the names of shared memory and semaphores once the process that made them is
gone: it has to survive that process's group, which is killed as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from typing import Any


def track_apart() -> None:
    """From now on the tracker of this process starts in a session of its own, when it does. It ends by itself."""
    resource_tracker.util = _Util()  # type: ignore[attr-defined]  # what it starts its process with


class _Util:
    """`multiprocessing.util`, but for how a process is started."""

    def __getattr__(self, name: str) -> Any:
        return getattr(util, name)

    @staticmethod
    def spawnv_passfds(path: bytes | str, args: Sequence[Any], passfds: Sequence[int]) -> int:
        """The id of a new process, with these descriptors beside the standard ones."""
        before = [os.get_inheritable(fd) for fd in passfds]
        try:
            for fd in passfds:
                os.set_inheritable(fd, True)
            return os.posix_spawn(path, [os.fsencode(arg) for arg in args], os.environ, setsid=True)
        finally:
            for fd, inheritable in zip(passfds, before, strict=True):
                os.set_inheritable(fd, inheritable)
