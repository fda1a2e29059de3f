"""Anonymous shared memory: mapped by several processes, without a name in any file system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import tempfile
import weakref

import numpy as np
import numpy.typing as npt
import torch

from batchopt_workers.data import mapping
from batchopt_workers.data.mapping import free_memory

# Bytes that are written at a time, at most.
_MOST = 2**30
ALIGNMENT = 64  # bytes: a cache line, and what torch's own allocator gives


def aligned(nbytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that holds `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in row-major order, shape `(bytes,)`; a view where they lie so."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element alone may have any stride


def anonymous_file() -> int:
    """A descriptor of a new, empty file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batchopt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:  # macOS: a file that has lost its name before anyone could open it
        return os.dup(file.fileno())


def _shortage(nbytes: int, free: int | None) -> str:
    known = "" if free is None else f" and {free / 1e6:.1f} MB are free"
    return (
        f"{nbytes / 1e6:.1f} MB of shared memory are needed{known}: use a smaller batch, fewer workers, or give the "
        "machine or the container more memory"
    )


def _explained(error: Exception, nbytes: int, free: int | None) -> Exception:
    """The error to raise in place of `error`, met while `nbytes` were asked for."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return OSError(
            errno.EMFILE,
            f"shared memory needs 2 open files a block, and this process may have no more than {limit}: raise the "
            "limit (`ulimit -n`), use fewer workers, or close each BatchOptimizer that is done",
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return OSError(
            errno.EFBIG,
            f"a block of shared memory needs {nbytes} bytes, and files of this process may have no more than {limit}: "
            "raise the limit (`ulimit -f`); parameters lie there with parallelize=1, too",
        )
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return OSError(
            error.errno,
            f"this system does not let the process make shared memory ({error}): parameters lie there, also with "
            "parallelize=1; allow memfd_create, fallocate and ftruncate, which a container's seccomp profile may "
            "forbid",
        )
    return MemoryError(f"{_shortage(nbytes, free)} ({error})")


def _take(fd: int, offset: int, nbytes: int) -> None:
    """Have the pages of so many bytes, which lengthen the file if they lie beyond its end."""
    free = free_memory()
    if free is not None and nbytes > free:  # the kernel would take what there is, then kill for the rest
        raise MemoryError(_shortage(nbytes, free))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
    else:
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + nbytes))


def _seal(fd: int) -> None:
    """The file keeps its length: whoever else has it cannot take away memory that this process would touch, which ends
    it with SIGBUS. Does nothing where the system cannot."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _new_file(nbytes: int, sparse: bool = False) -> int:
    """The descriptor of a file without a name, of so many zero bytes, for good."""
    try:
        fd = anonymous_file()
    except OSError as error:
        raise _explained(error, nbytes, free_memory()) from error
    try:
        if sparse:
            os.ftruncate(fd, nbytes)
        else:
            _take(fd, 0, nbytes)
        _seal(fd)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise _explained(error, nbytes, free_memory()) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


class GrowingFile:
    """Anonymous memory that is written as a file, by several processes; it may grow, and not shrink."""

    def __init__(self, fd: int | None = None) -> None:
        """A new one; or that behind `fd`, which this object owns from here on."""
        if fd is None:
            try:
                fd = anonymous_file()
            except OSError as error:
                raise _explained(error, 0, free_memory()) from error
            if hasattr(fcntl, "F_ADD_SEALS"):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def write(self, elements: memoryview, offset: int) -> None:
        """Write these bytes from `offset` on. Raises `MemoryError` and `OSError`."""
        done = 0
        try:
            while done < len(elements):
                done += os.pwrite(self.fd, elements[done : done + _MOST], offset + done)
        except OSError as error:
            raise _explained(error, offset + len(elements), free_memory()) from error

    def private(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of the file, for as long as somebody has them: what is written here stays here. Takes no
        descriptor, of which a process may have few. Raises `MemoryError` and `OSError`."""
        self.lengthen(nbytes, sparse=True)
        try:
            return np.asarray(mapping.PrivateView(self.fd, max(nbytes, 1)))
        except OSError as error:
            raise _explained(error, nbytes, free_memory()) from error

    def lengthen(self, nbytes: int, sparse: bool = False) -> None:
        """Be so many bytes long, in whole pages, and have those pages, unless it is `sparse`. Raises `MemoryError`."""
        present = os.fstat(self.fd).st_size
        nbytes = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if nbytes <= present:
            return
        try:
            os.ftruncate(self.fd, nbytes) if sparse else _take(self.fd, present, nbytes - present)
        except OSError as error:
            raise _explained(error, nbytes, free_memory()) from error


class SharedBlock:
    """One mapping of anonymous shared memory, known by its file descriptor alone.

    The kernel frees it when the last process has unmapped it, however that process ended. It does not
    live in /dev/shm, so a container's small /dev/shm does not limit it.
    """

    def __init__(self, fd: int, private: bool = False) -> None:
        """Map the memory behind `fd`, which this object owns from here on. `private`: what is written here stays
        here."""
        self.fd, self._close = fd, weakref.finalize(self, os.close, fd)
        self.nbytes = os.fstat(fd).st_size
        try:
            self._map = mmap.mmap(fd, self.nbytes, flags=mapping.UNRESERVED if private else mmap.MAP_SHARED)
        except (OSError, OverflowError) as error:
            self._close()
            raise _explained(error, self.nbytes, free_memory()) from error

    @classmethod
    def create(cls, nbytes: int, sparse: bool = False) -> SharedBlock:
        """A new block of at least `nbytes` zero bytes, in whole pages.

        Its pages are taken here, so a machine or a container without the memory raises `MemoryError` now instead of
        killing whoever touches a page later; those of a `sparse` one when they are reserved. Raises `OSError` where
        this process may open no more files, or may not make such memory.
        """
        return cls(_new_file(max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE, sparse))

    def reserve(self, offset: int, nbytes: int) -> None:
        """Take the pages of `nbytes` bytes from `offset` on, of a sparse block, unless they are there. Raises
        `MemoryError`."""
        if hasattr(os, "SEEK_HOLE") and os.lseek(self.fd, offset, os.SEEK_HOLE) >= offset + nbytes:
            return
        try:
            _take(self.fd, offset, nbytes)
        except OSError as error:
            raise _explained(error, nbytes, free_memory()) from error

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """The memory from byte `offset` on as a contiguous tensor; it keeps the mapping alive."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def protect(self, writable: bool = False) -> None:
        """Forbid this process to write here (to try is SIGSEGV), or allow it again. Does nothing where the C library
        cannot."""
        mapping.protect(self._map, writable)

    def discard(self) -> None:
        """Of a private mapping: drop what was written here, and see what the others see."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def keep_apart(self) -> None:
        """From now on a process that is forked from this one has a copy of its own, as at the time of the fork: for
        memory that tensors of the user view."""
        mapping.keep_apart(self._map)

    def make_private(self) -> None:
        """Be memory of this process alone, at the same address: tensors over it stay. For once nobody else uses it;
        does nothing in a fork, which has its own."""
        if self._close.alive and mapping.is_shared(self._map):
            mapping.make_private(self._map, self.fd)
            self.release()

    def make_shared(self) -> None:
        """Be memory that others can map again, at the same address. Raises as `create` does."""
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
        """Close `fd`; the mapping, and a descriptor of its own, live on for as long as a tensor views it."""
        self._close()
