"""The process that workers are forked from.

    parent ── socket ──► fork server: a request, with descriptors
           ◄── pipe ────              one a worker: its process id; at its end, its exit code

Importing torch takes a second or two, and a hundred megabytes; a fork of a process that has done so takes milliseconds,
and shares them. This process has one thread, and has computed nothing. It reaps the workers that end, and kills what
they leave running; and they end with it, as it ends with the parent.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker, util
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace
from typing import NamedTuple

import numpy

from batchopt_workers.life import faults, loop
from batchopt_workers.life.parent import tie

# Seconds without a worker and without a request after which the fork server ends.
LINGER = 60.0
HAS_THREADS = 77  # an exit code
# Signals that schedulers send to all processes of a job, and that are meant for the parent: this process ignores them.
OF_JOBS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# In a worker's pipe: its process id, or -errno if there is none; then its exit code, or minus the signal that ended it.
NUMBER = struct.Struct("!i")
# Of a worker to fork: its rank, how many there are, its threads, and the signals that it is to ignore, as bits.
REQUEST = struct.Struct("!4I")


class Descriptors(NamedTuple):
    """The descriptors sent with a request: the connection that the worker serves; the writing end of its pipe; its
    standard output and error."""

    connection: int
    pipe: int
    stdout: int
    stderr: int


def main(end: int, parent: int, *libraries: str) -> None:
    """Serve process `parent` over a socket until it hangs up or ends, or has not needed this process for `LINGER`
    seconds. `libraries` are imported first, so that workers need not; if one starts threads, which a fork would lose,
    this process ends with `HAS_THREADS`."""
    for number in OF_JOBS:
        signal.signal(number, signal.SIG_IGN)
    _import(libraries)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to the memory that it shares with the others
    Server(socket.socket(fileno=end), parent).serve()
    os._exit(0)  # functions registered to run at exit are for the workers


def _import(libraries: Sequence[str]) -> None:
    before = len(os.listdir("/proc/self/task"))
    for name in libraries:
        with warnings.catch_warnings(), suppress(Exception):  # the worker that needs it finds out
            warnings.simplefilter("ignore")
            import_module(name)
    if len(os.listdir("/proc/self/task")) > before:
        os._exit(HAS_THREADS)


class Server:
    """Forks workers for process `parent`, and reaps them."""

    def __init__(self, end: socket.socket, parent: int) -> None:
        self._end, self._parent = end, parent
        self._pipes: dict[int, int] = {}  # of workers that were not reaped, by process id
        self._leash, self._held = os.pipe()  # workers end when the second one is closed
        self._children, self._signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # something to read when one has ended

    def serve(self) -> None:
        """Serve requests as long as there may be some."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: the signal is written to the descriptor
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.register(self._children, select.POLLIN)
        with suppress(AttributeError, OSError):  # not on this system, or not allowed in this container
            poll.register(os.pidfd_open(self._parent), select.POLLIN)  # a fork may hold the other end of the socket
        with suppress(ConnectionError):  # gone already
            self._end.send(b"serves")
        while True:
            ready = {fd for fd, _ in poll.poll(1000 * LINGER)}
            if self._children in ready:
                os.read(self._children, 2**16)
                self._reap()
            if not ready and not self._pipes:
                return
            if self._end.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self._end, REQUEST.size, len(Descriptors._fields))
                if not message:
                    return
                self._fork(REQUEST.unpack(message), Descriptors(*fds))
            elif not ready <= {self._children}:
                return

    def _reap(self) -> None:
        """Reap the workers that have ended, and tell how."""
        for pid, pipe in list(self._pipes.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                # As long as it was not reaped, its id cannot belong to another process, or group. It is told before
                # that, so that the parent does not use the id afterwards.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                _tell(pipe, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
                os.close(self._pipes.pop(pid))
                os.waitpid(pid, 0)

    def _fork(self, request: Sequence[int], descriptors: Descriptors) -> None:
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
                signal.set_wakeup_fd(-1)
                for fd in (self._end.detach(), self._held, self._children, self._signals, *self._pipes.values()):
                    os.close(fd)
                _become_worker(request, descriptors, self._leash, self._parent)
            finally:
                os._exit(1)
        _tell(descriptors.pipe, pid)
        if pid > 0:
            self._pipes[pid] = os.dup(descriptors.pipe)
        for fd in descriptors:
            os.close(fd)


def _tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody asks any more
        os.write(pipe, NUMBER.pack(number))


def _become_worker(request: Sequence[int], descriptors: Descriptors, leash: int, parent: int) -> None:
    """Run a worker. It keeps the writing end of its pipe: when the fork server is killed, the pipe closes only once the
    worker is gone as well, and writes no shared memory any more."""
    rank, world_size, threads, ignored = request
    os.setsid()  # killed with all that it starts; Ctrl-C in a terminal reaches the parent only
    own = os.open(f"/proc/self/fd/{leash}", os.O_RDONLY | os.O_NONBLOCK)  # opened anew, with an owner of its own
    os.close(leash)
    tie(own, os.getpgrp())
    with suppress(BlockingIOError):  # the fork server has ended before that
        os.read(own, 1)
        os._exit(1)
    resource_tracker.util = _util()  # type: ignore[attr-defined]  # the module that it starts its process with
    for fd, standard in ((descriptors.stdout, 1), (descriptors.stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the parent only
    for number in OF_JOBS:
        signal.signal(number, signal.SIG_IGN if ignored >> number & 1 else signal.SIG_DFL)
    faults.rank = rank
    faults.point("worker.start")
    for fd in (descriptors.connection, descriptors.pipe):
        os.set_inheritable(fd, False)
    numpy.random.seed()  # a separate seed for each worker, as in Python's `random`
    process = SpawnProcess(  # processes that the user starts in it are spawned, since it has threads
        target=loop.main,
        args=(socket.socket(fileno=descriptors.connection), rank, world_size, threads),
        name=f"batchopt-worker-{rank}",
    )
    process._parent_pid = parent  # type: ignore[attr-defined]
    process._bootstrap(parent_sentinel=own)  # type: ignore[attr-defined]


def _util() -> SimpleNamespace:
    """Return `multiprocessing.util` with another way to start the resource tracker: in a session of its own, so that it
    outlives its worker for as long as it cleans up."""

    def spawn(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        return subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True).pid

    return SimpleNamespace(**{**vars(util), "spawnv_passfds": spawn})
