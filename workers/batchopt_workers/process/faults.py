"""Named points at which tests make things go wrong: a death, a stop, an error, in the middle of anything.

In workers there is one wherever the user's code has come to an end, before anything of it is written: there a copy of
the worker ends, too. Off, as always but in these cases, a point is one comparison with None.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# Called with a point's name, and the number of the chunk that it is about (-1: about none).
hook: Callable[[str, int], None] | None = None
# Of this process, if it is a worker.
rank = -1


def point(name: str, chunk: int = -1) -> None:
    """Something may go wrong here."""
    if hook is not None:
        hook(name, chunk)


def end_copies() -> None:
    """From now on a process that the user's code forks from this worker, and that comes back from there, ends: two
    would read the orders of one. What it does there is its own."""

    def end(*_: object) -> None:
        os._exit(1)

    def in_child() -> None:
        global hook
        hook = end

    os.register_at_fork(after_in_child=in_child)
