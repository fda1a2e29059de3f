"""What workers wake their parent up through, where it does not wait for their pipes."""

from __future__ import annotations

import os
import weakref


class WakingPipe:
    """A pipe that all workers of a group write to; `reader` is the parent's end, and `fd` theirs. Neither blocks: what
    does not go in any more says nothing new."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()
        for end in (self.reader, self.fd):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)
