"""Memory that several processes map: anonymous, without a name in any file system."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import torch

ALIGNMENT = 64  # bytes: a cache line, and what torch's own allocator gives


def aligned(nbytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that holds `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedBlock:
    """One mapping of anonymous shared memory, known by its file descriptor alone.

    The kernel frees it when the last process has unmapped it, however that process ended. It does not
    live in /dev/shm, so a container's small /dev/shm does not limit it.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory behind `fd`, which this object owns from here on."""
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.nbytes)
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """A new block of at least `nbytes` zero bytes, in whole pages.

        Its pages are taken here, so a machine without the memory raises `MemoryError` now instead of
        killing whoever touches a page later.
        """
        nbytes = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("batchopt", os.MFD_CLOEXEC)
        else:  # macOS: a file that has lost its name before anyone could open it
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.ftruncate(fd, nbytes)
            return cls(fd)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise MemoryError(f"no {nbytes / 1e6:.1f} MB of shared memory: {error}") from error

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """The memory from byte `offset` on as a contiguous tensor; it keeps the mapping alive."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def release(self) -> None:
        """Close `fd`; the mapping, and a descriptor of its own, live on for as long as a tensor views it."""
        self._close()
