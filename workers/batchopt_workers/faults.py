"""Named points at which tests make things go wrong: a death, a stop, an error, in the middle of anything.

Off, as always but in those tests, a point is one comparison with None.
"""

from __future__ import annotations

from collections.abc import Callable

# Called with a point's name, and the number of the chunk that it is about (-1: about none).
hook: Callable[[str, int], None] | None = None
# Of this process, if it is a worker.
rank = -1


def point(name: str, chunk: int = -1) -> None:
    """Something may go wrong here."""
    if hook is not None:
        hook(name, chunk)
