"""Replaces a memory mapping by another with the same content at the same address: shared by private, or back.

So every tensor over it stays valid. What must hold: a forked process has memory of its own, as at the time of the fork.
The kernel sees to that where memory is private; of what is shared a copy is made before each fork, and the child moves
it there. All of this is for processes with workers, and so for Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

_FIXED = 0x10  # MAP_FIXED
_MOVE = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# A private mapping of a file, without reserved swap, since it is rarely written.
UNRESERVED = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE, and FALLOC_FL_KEEP_SIZE
# Bytes that are copied at a time, and released before the next.
_PIECE = 2**26


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.mprotect.argtypes = (pointer, size, number)
    libc.mremap.argtypes, libc.mremap.restype = (pointer, size, size, number, pointer), pointer
    return libc


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def protect(mapping: mmap.mmap, writable: bool) -> None:
    """Forbid this process to write there, or allow it again. Does nothing if the C library cannot."""
    with suppress(OSError, AttributeError):
        _libc().mprotect(address_of(mapping), len(mapping), _WRITABLE if writable else mmap.PROT_READ)


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


class PrivateView:
    """The first bytes of a file as an array, for NumPy: writes stay in this process. Unlike a mapping of Python's it
    holds no descriptor."""

    def __init__(self, fd: int, nbytes: int) -> None:
        address = _checked(_libc().mmap(None, nbytes, _WRITABLE, UNRESERVED, fd, 0))
        weakref.finalize(self, _libc().munmap, address, nbytes).atexit = False  # it may still be read at exit
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def _copy(address: int, nbytes: int) -> int:
    """Return the address of new memory of this process, with the content of that at `address`. Raise `OSError`."""
    copy = _checked(_libc().mmap(None, nbytes, _WRITABLE, PRIVATE, -1, 0))
    ctypes.memmove(copy, address, nbytes)
    return copy


def _move(source: int, nbytes: int, target: int) -> None:
    """Replace the memory at `target` by that at `source`, atomically."""
    _checked(_libc().mremap(source, nbytes, nbytes, _MOVE, target))


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Release the file's memory for these bytes, which become zero; its length stays."""
    with suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).fallocate(fd, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))


def make_private(mapping: mmap.mmap, fd: int) -> None:
    """Replace a shared mapping of the file `fd`, which no one else may be using, by memory of this process; this takes
    a piece more than before, since the file is emptied on the way."""
    start, nbytes = address_of(mapping), len(mapping)
    with _lock:
        for offset in reversed(range(0, nbytes, _PIECE)):
            length = min(_PIECE, nbytes - offset)
            try:
                _move(_copy(start + offset, length), length, start + offset)
            except OSError:  # no memory: the rest stays in the file until a page of it is written
                _checked(_libc().mmap(start, offset + length, _WRITABLE, mmap.MAP_PRIVATE | _FIXED, fd, 0))
                break
            punch_hole(fd, offset, length)
        _shared.pop(start, None)


def make_shared(mapping: mmap.mmap, fd: int) -> None:
    """Replace the memory of `mapping` by the file `fd` of the same length, with its content. Raise `OSError`."""
    start, nbytes = address_of(mapping), len(mapping)
    done = 0
    with memoryview(mapping) as content:
        while done < nbytes:
            done += os.pwrite(fd, content[done:], done)
    _checked(_libc().mmap(start, nbytes, _WRITABLE, mmap.MAP_SHARED | _FIXED, fd, 0))
    copy_on_fork(mapping)


# Mappings, by address, that tensors of the user view and that a child must not share with this process. They live as
# long as such a tensor.
_shared: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
# Copies of such mappings for the child that is being forked, and their lengths, by address.
_copies: dict[int, tuple[int, int]] = {}
# Held while a mapping is replaced, and while this process forks.
_lock = threading.RLock()


def copy_on_fork(mapping: mmap.mmap) -> None:
    """Give each process that is forked from now on its own copy of this shared mapping."""
    _shared[address_of(mapping)] = mapping


def is_shared(mapping: mmap.mmap) -> bool:
    """Tell whether forked processes get a copy of it, and it is not such a copy itself."""
    return _shared.get(address_of(mapping)) is mapping


_forks = 0


def forks() -> int:
    """Return how often this process has forked."""
    return _forks


def _before_fork() -> None:
    """Make the copies: after the fork this process may write before the child has read."""
    global _forks
    _lock.acquire()
    _forks += 1
    for mapping in [*_shared.values()]:
        address, nbytes, free = address_of(mapping), len(mapping), free_memory()
        try:
            if free is not None and nbytes > free:  # the kernel would grant it, and kill a process for it later
                raise OSError(f"{free / 1e6:.1f} MB are free")
            _copies[address] = _copy(address, nbytes), nbytes
        except OSError as error:
            warnings.warn(
                f"{nbytes / 1e6:.1f} MB for a copy of the parameters that a BatchOptimizer shares with its workers "
                f"could not be allocated ({error}): the process that is forked here shares them with this one, and "
                "must not write them; fork it before the BatchOptimizer is built or after it is closed, or give the "
                "machine or the container more memory",
                RuntimeWarning,
                stacklevel=3,
            )


def _after_fork_in_parent() -> None:
    while _copies:
        _libc().munmap(*_copies.popitem()[1])
    _lock.release()


def _after_fork_in_child() -> None:
    while _copies:
        address, (copy, nbytes) = _copies.popitem()
        _move(copy, nbytes, address)
    _shared.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# A container's own control group, as seen inside: limit, usage, statistics, and the keys of file caches.
_VERSIONS = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that the machine has free or could free, including swap, and that the container's limit allows;
    None if unknown. Rather too many than too few."""
    try:
        machine = _numbers(meminfo)
        swap = 1024 * machine.get("SwapFree", 0)
        free = 1024 * machine["MemAvailable"] + swap
    except (OSError, ValueError, KeyError):
        return None
    room = _room(cgroup)
    return free if room is None else min(free, room + swap)


def _numbers(path: Path) -> dict[str, int]:
    """Return the number for each name, in lines such as `MemFree: 12 kB`, or without colon and unit."""
    fields = [line.split() for line in path.read_text().splitlines()]
    return {name.rstrip(":"): int(number) for name, number, *_ in fields}


def _room(cgroup: Path) -> int | None:
    """Return the bytes between the control group's use, minus file caches, and its limit; None without a limit."""
    for limit, usage, statistics, cached in _VERSIONS:
        try:
            most, used = (cgroup / limit).read_text().strip(), int((cgroup / usage).read_text())
            if most == "max":
                return None
            found = _numbers(cgroup / statistics)
            return max(0, int(most) - used + sum(found.get(key, 0) for key in cached))
        except (OSError, ValueError):
            continue
    return None
