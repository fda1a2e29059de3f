"""Anonymous shared memory: mapped by several processes, without a name in any file system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from batchopt_workers.wire import mapping
from batchopt_workers.wire.mapping import free_memory

# Most bytes that are written at a time.
_MOST = 2**30
ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's own allocator


def aligned(nbytes: int) -> int:
    """Return the smallest multiple of `ALIGNMENT` that holds `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _in_pages(nbytes: int) -> int:
    return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of its elements in row-major order, shape `(bytes,)`; a view if they are stored so."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def anonymous_file() -> int:
    """Return a descriptor of a new, empty file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batchopt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:  # for a Python that was built on an older Linux
        return os.dup(file.fileno())


def _shortage(nbytes: int, free: int | None) -> str:
    known = "" if free is None else f" and {free / 1e6:.1f} MB are free"
    return (
        f"{nbytes / 1e6:.1f} MB of shared memory are needed{known}: use a smaller batch, fewer workers, or give the "
        "machine or the container more memory"
    )


@contextmanager
def _explained(nbytes: int) -> Iterator[None]:
    """Raise errors that say what to do for those of the system in the body, which requests `nbytes`."""
    try:
        yield
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            why = (
                f"shared memory needs 2 open files a block, and this process may have no more than {limit}: raise the "
                "limit (`ulimit -n`), use fewer workers, or close each BatchOptimizer that is done"
            )
        elif number == errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            why = (
                f"a block of shared memory needs {nbytes} bytes, and files of this process may have no more than "
                f"{limit}: raise the limit (`ulimit -f`), or use parallelize=1"
            )
        elif number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            why = (
                f"this system does not let the process make shared memory ({error}): allow memfd_create, fallocate "
                "and ftruncate, which a container's seccomp profile may forbid, or use parallelize=1"
            )
        else:
            raise MemoryError(f"{_shortage(nbytes, free_memory())} ({error})") from error
        raise OSError(number, why) from error


def _take(fd: int, offset: int, nbytes: int) -> None:
    """Allocate the pages of `nbytes` bytes, which lengthen the file if they lie beyond its end. Raise `MemoryError`."""
    free = free_memory()
    if free is not None and nbytes > free:  # the kernel would take what is free, then kill a process for the rest
        raise MemoryError(_shortage(nbytes, free))
    os.posix_fallocate(fd, offset, nbytes)


def _seal(fd: int) -> None:
    """Fix the file's length: no other process can take away memory that this process would access, which would kill it
    with SIGBUS. Does nothing if the system cannot."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _new_file(nbytes: int) -> int:
    """Return the descriptor of a file without a name, of `nbytes` zero bytes and fixed length."""
    with _explained(nbytes):
        fd = anonymous_file()
        try:
            _take(fd, 0, nbytes)
            _seal(fd)
        except BaseException:
            os.close(fd)
            raise
    return fd


class GrowingFile:
    """Anonymous memory that several processes write as a file; it may grow, but not shrink."""

    def __init__(self, fd: int | None = None) -> None:
        """Create a new one; or use that behind `fd`, which this object owns from here on."""
        if fd is None:
            with _explained(0):
                fd = anonymous_file()
            if hasattr(fcntl, "F_ADD_SEALS"):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def write(self, elements: memoryview, offset: int) -> None:
        """Write these bytes from `offset` on. Raise `MemoryError` and `OSError`."""
        done = 0
        with _explained(offset + len(elements)):
            while done < len(elements):
                done += os.pwrite(self.fd, elements[done : done + _MOST], offset + done)

    def read(self, elements: memoryview, offset: int) -> None:
        """Fill `elements` with the bytes from `offset` on, all of which must be there. Raise `OSError`."""
        done = 0
        while done < len(elements):
            done += os.preadv(self.fd, [elements[done : done + _MOST]], offset + done)

    def shared(self) -> torch.Tensor:
        """Return all of its bytes, mapped as long as the tensor lives. Raise `MemoryError` and `OSError`."""
        nbytes = os.fstat(self.fd).st_size
        with _explained(nbytes):
            return torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)

    def private(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the first bytes of the file, mapped as long as the array lives; writes to it stay in this process.
        Takes no descriptor, of which a process may have few. Raise `MemoryError` and `OSError`."""
        self.lengthen(nbytes, sparse=True)
        with _explained(nbytes):
            return np.asarray(mapping.PrivateView(self.fd, max(nbytes, 1)))

    def lengthen(self, nbytes: int, sparse: bool = False) -> None:
        """Make it at least `nbytes` long, in full pages, allocated unless it is `sparse`. Raise `MemoryError`."""
        present = os.fstat(self.fd).st_size
        nbytes = _in_pages(nbytes)
        if nbytes <= present:
            return
        with _explained(nbytes):
            os.ftruncate(self.fd, nbytes) if sparse else _take(self.fd, present, nbytes - present)


class SharedBlock:
    """One mapping of anonymous shared memory, known by its file descriptor alone.

    The kernel frees it when the last process has unmapped it, however that process ended. It does not live in /dev/shm,
    so a container's small /dev/shm does not limit it.
    """

    def __init__(self, fd: int, private: bool = False, nbytes: int = 0) -> None:
        """Map the memory behind `fd`, which this object owns from here on. `private`: writes stay in this process. With
        `fd` -1 it is new memory of this process, of at least `nbytes` zero bytes, which can be shared later."""
        self.fd, self._close = fd, weakref.finalize(self, os.close, fd)
        if fd < 0:
            self._close.detach()
            self.nbytes, flags = _in_pages(nbytes), mapping.PRIVATE
        else:
            self.nbytes, flags = os.fstat(fd).st_size, mapping.UNRESERVED if private else mmap.MAP_SHARED
        with _explained(self.nbytes):
            self._map = mmap.mmap(fd, self.nbytes, flags=flags)
        # What tensors hold: it ends before the mapping does.
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """Return a new block of at least `nbytes` zero bytes, in full pages.

        Its pages are allocated here, so a machine or a container without the memory raises `MemoryError` now instead of
        killing a process that accesses a page later. Raise `OSError` if this process may open no more files, or may not
        create such memory.
        """
        return cls(_new_file(_in_pages(nbytes)))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """Return the memory from byte `offset` on as a contiguous tensor; it keeps the mapping alive."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(shape)

    def protect(self, writable: bool = False) -> None:
        """Forbid this process to write here (a write is then SIGSEGV), or allow it again. Does nothing if the C library
        cannot."""
        mapping.protect(self._map, writable)

    def discard(self) -> None:
        """Drop what was written to a private mapping, so that it shows the shared content again."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def copy_on_fork(self) -> None:
        """Give each process that is forked from now on its own copy, as at the time of the fork: for memory that
        tensors of the user view."""
        mapping.copy_on_fork(self._map)

    def make_private(self) -> None:
        """Turn it into memory of this process, at the same address: tensors over it stay valid. Call it when no other
        process uses it; does nothing in a fork, which has its own."""
        if self._close.alive and mapping.is_shared(self._map):
            mapping.make_private(self._map, self.fd)
            self.release()

    def make_shared(self) -> None:
        """Turn it into memory that others can map, at the same address, and of which forked processes get copies.
        Raise as `create` does."""
        if self._close.alive:
            return
        fd = _new_file(self.nbytes)
        try:
            mapping.make_shared(self._map, fd)
        except BaseException:
            os.close(fd)
            raise
        self.fd, self._close = fd, weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        """Close `fd`; the mapping, and a descriptor of its own, live on as long as a tensor views it."""
        self._close()
