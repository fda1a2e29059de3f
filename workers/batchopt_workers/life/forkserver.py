"""The process that workers are forked from.

Importing torch takes a second or two, and a hundred megabytes; a fork of a process that has done so takes milliseconds,
and shares them. This process has one thread, has computed nothing, and only does what the parent requests: fork a
worker, and report how one ended. Processes that an ended worker leaves running are killed here.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import IntEnum
from importlib import import_module
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import numpy

from batchopt_workers.life import faults, loop

# Seconds without a worker and without a request after which the fork server ends.
LINGER = 60.0
# Seconds between checks whether forgotten workers and orphans have ended.
_INTERVAL = 0.1
# Seconds for workers, and the processes that they leave, to end once the parent is gone.
_ENDING = 2.0
_F_SETSIG = 10  # Linux; Python does not name it
HAS_THREADS = 77  # an exit code


class Command(IntEnum):
    """A request to the fork server."""

    FORK = 1  # a worker, with its descriptors; answered by its process id, or -errno
    REAP = 2  # a worker, by its process id; answered by its exit code (`os.waitstatus_to_exitcode`)
    FORGET = 3  # the same, but not answered
    GREET = 4  # answered by 0


class CommandMessage(NamedTuple):
    """A message of the parent: for `FORK` the worker's rank, the world size, its threads, and the signals that it is to
    ignore, as bits; else `pid` and zeros."""

    number: int
    task: Command
    subject: int
    world_size: int = 0
    threads: int = 0
    ignored: int = 0

    def encode(self) -> bytes:
        """Return the complete message."""
        return REQUEST.pack(*self)

    @classmethod
    def decode(cls, message: bytes) -> CommandMessage:
        """Invert `encode`."""
        number, task, *others = REQUEST.unpack(message)
        return cls(number, Command(task), *others)


REQUEST = struct.Struct("!QBIIII")
# Signals that schedulers send to all processes of a job, and that are meant for the parent: this process ignores them.
OF_JOBS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The request's number, and the answer.
REPLY = struct.Struct("!Qi")


class Descriptors(NamedTuple):
    """The descriptors sent with `FORK`: the worker's end of its pipe; one that becomes readable when the parent is
    gone; one that closes with the worker; its standard output and error."""

    connection: int
    parent_alive: int
    alive: int
    stdout: int
    stderr: int


def main(
    connection: Connection, parent: int, leash: int = -1, libraries: Sequence[str] = (), path: Sequence[str] = ()
) -> None:
    """Serve process `parent` until it hangs up or ends, or has not needed this process for `LINGER` seconds. `leash`: a
    descriptor whose signal ends this process, in any state, when the parent is gone. `libraries` are imported first,
    along the parent's `path`, so that workers need not; if one starts threads, which a fork would lose, this process
    ends with `HAS_THREADS`."""
    for number in OF_JOBS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may be inherited as ignored: then no child can be waited for
    _import(libraries, path)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to the memory that it shares with the others
    adopt()
    if leash >= 0:  # from now on this process can clean up; if it is stopped, it must continue for that
        fcntl.fcntl(leash, _F_SETSIG, signal.SIGCONT)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        connection.close()
        orphans = Orphans()
        workers = _serve(end, parent, orphans)
    _end(workers, orphans)
    os._exit(0)  # functions registered to run at exit are for the workers


def _import(libraries: Sequence[str], path: Sequence[str]) -> None:
    if libraries:
        sys.path[:] = path
    before = len(os.listdir("/proc/self/task"))
    for name in libraries:
        with warnings.catch_warnings(), suppress(Exception):  # the worker that needs it finds out
            warnings.simplefilter("ignore")
            import_module(name)
    if len(os.listdir("/proc/self/task")) > before:
        os._exit(HAS_THREADS)


def _serve(end: socket.socket, parent: int, orphans: Orphans) -> set[int]:
    """Serve requests, and return the workers that were not reaped."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    if hasattr(os, "pidfd_open"):  # another process may hold the parent's end of the socket
        try:
            poll.register(os.pidfd_open(parent), select.POLLIN)
        except ProcessLookupError:
            return set()
        except OSError:  # not allowed in this container
            pass
    workers: set[int] = set()
    forgotten: set[int] = set()
    orphaned = False
    while True:
        cleans_up = bool(forgotten) or orphaned
        ready = poll.poll(1000 * (_INTERVAL if cleans_up else LINGER))
        for pid in [pid for pid in forgotten if has_ended(pid)]:
            forgotten.remove(pid)
            orphaned = True
        orphaned = orphaned and orphans.end(workers | forgotten)
        if not (ready or workers or cleans_up):
            return set()
        if any(fd != end.fileno() for fd, _ in ready):
            return workers | forgotten
        if ready:
            message, fds, _, _ = socket.recv_fds(end, REQUEST.size, len(Descriptors._fields))
            if len(message) < REQUEST.size:
                return workers | forgotten
            request = CommandMessage.decode(message)
            if request.task == Command.FORK:
                answer = _fork(end, request, Descriptors(*fds), parent)
                workers |= {answer} if answer > 0 else set()
            elif request.task == Command.GREET:
                answer = 0
            else:
                workers.discard(request.subject)
                if request.task == Command.FORGET:
                    forgotten.add(request.subject)
                    continue
                answer = _reap(request.subject)
                orphaned = orphans.end(workers | forgotten)
            with suppress(OSError):  # the parent is gone; the next poll shows it
                end.sendall(REPLY.pack(request.number, answer))


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end(workers: set[int], orphans: Orphans) -> None:
    """Kill the workers, and the processes that they leave."""
    for pid in workers:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    until = time.monotonic() + _ENDING
    while time.monotonic() < until:
        workers = {pid for pid in workers if not has_ended(pid)}
        if not orphans.end(workers) and not workers:
            return
        time.sleep(0.01)


def _fork(end: socket.socket, request: CommandMessage, descriptors: Descriptors, parent: int) -> int:
    """Return the worker's process id, or -errno. In the worker this does not return."""
    sys.stdout.flush()  # what the user's start-up code wrote is written once
    sys.stderr.flush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's threads, if any, are prepared for a fork
            pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        try:
            end.close()
            _become_worker(request, descriptors, parent)
        finally:
            os._exit(1)
    for fd in descriptors:
        os.close(fd)
    return pid


def _become_worker(request: CommandMessage, descriptors: Descriptors, parent: int) -> None:
    os.setsid()  # killed with all that it starts; Ctrl-C in a terminal reaches the parent only
    track_apart()
    adopt()  # orphans of its children are its own, for as long as it lives
    os.dup2(descriptors.stdout, 1)
    os.dup2(descriptors.stderr, 2)
    os.close(descriptors.stdout)
    os.close(descriptors.stderr)
    for number in OF_JOBS:
        signal.signal(number, signal.SIG_DFL)
    faults.rank = request.subject
    faults.point("worker.start")
    for fd in descriptors[:3]:
        os.set_inheritable(fd, False)
    numpy.random.seed()  # a separate seed for each worker, as in Python's `random`
    process = SpawnProcess(  # processes that the user starts in it are spawned, since it has threads
        target=loop.main,
        args=(socket.socket(fileno=descriptors.connection), *request[2:]),
        name=f"batchopt-worker-{request.subject}",
        daemon=False,
    )
    process._parent_pid = parent  # type: ignore[attr-defined]
    process._parent_name = _parent_name()  # type: ignore[attr-defined]
    process._bootstrap(parent_sentinel=descriptors.parent_alive)  # type: ignore[attr-defined]


def _parent_name() -> str:
    mother = multiprocessing.parent_process()
    return mother.name if mother is not None else "MainProcess"


def track_apart() -> None:
    """Let the resource tracker of this process start in a session of its own, if it is started. It ends by itself."""
    resource_tracker.util = _Util()  # type: ignore[attr-defined]  # the module that it starts its process with


class _Util:
    """`multiprocessing.util` with another way to start a process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(util, name)

    @staticmethod
    def spawnv_passfds(path: bytes | str, args: Sequence[Any], passfds: Sequence[int]) -> int:
        """Return the id of a new process that has these descriptors in addition to the standard ones."""
        before = [os.get_inheritable(fd) for fd in passfds]
        try:
            for fd in passfds:
                os.set_inheritable(fd, True)
            return os.posix_spawn(path, [os.fsencode(arg) for arg in args], os.environ, setsid=True)
        finally:
            for fd, inheritable in zip(passfds, before, strict=True):
                os.set_inheritable(fd, inheritable)


# Seconds for an orphan to end by itself: Python's resource tracker cleans up after its process first.
GRACE = 1.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Make this process the parent of orphans among its descendants from now on. Does nothing if the system cannot."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the children of this process, which has one thread; an empty set if the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


class Orphans:
    """Kills the children that a process did not start."""

    def __init__(self) -> None:
        """Exclude the existing children."""
        self._others = children()
        self._deadlines: dict[int, float] = {}

    def end(self, own: Collection[int]) -> bool:
        """Kill those that are not `own` after their grace period. Call this again as long as it returns True: some
        remain, or may have left others."""
        now = time.monotonic()
        for pid in children() - self._others - {*own}:
            if now >= self._deadlines.setdefault(pid, now + GRACE):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        left = bool(self._deadlines)
        for pid in list(self._deadlines):
            if has_ended(pid):
                del self._deadlines[pid]
        return left


def has_ended(pid: int) -> bool:
    """Tell whether that child has ended; if so, it is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
