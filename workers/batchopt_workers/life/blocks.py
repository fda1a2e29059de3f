"""The parent's memory, as a worker maps it."""

from __future__ import annotations

import os

from batchopt_workers.wire.memory import SharedBlock


class Blocks:
    """The parent's shared memory, by name: as it is, or also private mappings of it, in which what the user's code
    writes stays in this process; one to work on, and a fresh one to compare with."""

    def __init__(self) -> None:
        self._shared: dict[str, SharedBlock] = {}
        self._private: dict[str, SharedBlock] = {}
        self._fresh: dict[str, SharedBlock] = {}

    def __getitem__(self, name: str) -> SharedBlock:
        """Return the shared memory of that name."""
        return self._shared[name]

    def private(self, name: str) -> SharedBlock:
        """Return the private mapping of that name."""
        return self._private[name]

    def fresh(self, name: str) -> SharedBlock:
        """Return a private mapping of that name that shows what the parent has written."""
        self._fresh[name].discard()
        return self._fresh[name]

    def map(self, name: str, fd: int, private: bool = False) -> None:
        """Map the memory behind `fd`, in place of earlier memory of that name."""
        self.drop(name)
        for mappings in (self._private, self._fresh) if private else ():
            mappings[name] = SharedBlock(os.dup(fd), private=True)
            mappings[name].release()
        block = SharedBlock(fd)
        block.release()
        self._shared[name] = block

    def drop(self, name: str) -> None:
        """Forget the memory of that name."""
        self._shared.pop(name, None)
        self._private.pop(name, None)
        self._fresh.pop(name, None)

    def discard(self) -> None:
        """Discard what was written to private mappings."""
        for block in self._private.values():
            block.discard()
