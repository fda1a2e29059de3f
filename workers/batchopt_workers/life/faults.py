"""Named points at which tests inject faults: a death, a stop, an error, in the middle of anything.

Workers have one wherever the user's code has returned, before any of its results is written: a forked copy of the
worker ends there, too. Without a hook, the usual case, a point is one comparison with None.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# Called with a point's name, and the number of its chunk (-1: none).
hook: Callable[[str, int], None] | None = None
# The rank of this process, if it is a worker.
rank = -1


def point(name: str, chunk: int = -1) -> None:
    """Call the hook, if there is one."""
    if hook is not None:
        hook(name, chunk)


def end_copies() -> None:
    """End, from now on, every process that the user's code forks from this worker and that returns from there: two
    processes would read the orders of one. Until it returns, it may do anything."""

    def end(*_: object) -> None:
        os._exit(1)

    def in_child() -> None:
        global hook
        hook = end

    os.register_at_fork(after_in_child=in_child)
