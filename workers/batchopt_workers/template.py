"""The process that workers are forked from.

To import torch takes a second or two, and a hundred megabytes; a fork of a process that has done so takes milliseconds,
and shares them. This one has one thread, has computed nothing, and only does what the parent asks: fork a worker, and
say how one ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import socket
import struct
import sys
import warnings
from contextlib import suppress
from enum import IntEnum
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import numpy

from batchopt_workers import faults, loop

# Seconds without a worker and without a request after which the template ends.
LINGER = 60.0
# Seconds between two looks at whether the workers that nobody asks for have ended.
_INTERVAL = 0.1


class Task(IntEnum):
    """What the template is asked for."""

    FORK = 1  # a worker, whose descriptors come along; answered by its process id, or less: -errno
    REAP = 2  # the end of a worker, by its process id; answered by how it ended, as `os.waitstatus_to_exitcode` has it
    FORGET = 3  # the same, but not answered


class Request(NamedTuple):
    """A message of the parent: for `FORK` the worker's rank, their number, and its threads; else `pid` and zeros."""

    number: int
    task: Task
    subject: int
    world_size: int = 0
    threads: int = 0

    def encode(self) -> bytes:
        """The whole message."""
        return REQUEST.pack(*self)

    @classmethod
    def decode(cls, message: bytes) -> Request:
        """The inverse of `encode`."""
        number, task, *others = REQUEST.unpack(message)
        return cls(number, Task(task), *others)


REQUEST = struct.Struct("!QBIII")
# The request's number, and the answer.
REPLY = struct.Struct("!Qi")


class Descriptors(NamedTuple):
    """What comes along with `FORK`: the worker's end of its pipe; what becomes readable when the parent is gone; what
    closes with the worker; its standard output and error."""

    connection: int
    parent_alive: int
    alive: int
    stdout: int
    stderr: int


def main(connection: Connection, parent: int) -> None:
    """Serve process `parent` until it hangs up or ends, or has not needed this process for a while."""
    gc.collect()
    gc.freeze()  # a collection in a worker would write to all that it shares with the others
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        connection.close()
        _serve(end, parent)
    os._exit(0)  # what was registered to run at exit is the workers' affair


def _serve(end: socket.socket, parent: int) -> None:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    if hasattr(os, "pidfd_open"):  # for somebody else may hold the parent's end of the socket
        try:
            poll.register(os.pidfd_open(parent), select.POLLIN)
        except ProcessLookupError:
            return
        except OSError:  # not allowed in this container
            pass
    workers: set[int] = set()
    forgotten: set[int] = set()
    while True:
        ready = poll.poll(1000 * (_INTERVAL if forgotten else LINGER))
        for pid in list(forgotten):
            if os.waitpid(pid, os.WNOHANG)[0]:
                forgotten.remove(pid)
        if not ready and not workers and not forgotten:
            return
        if any(fd != end.fileno() for fd, _ in ready):
            return
        if ready:
            message, fds, _, _ = socket.recv_fds(end, REQUEST.size, len(Descriptors._fields))
            if len(message) < REQUEST.size:
                return
            request = Request.decode(message)
            if request.task == Task.FORK:
                answer = _fork(end, request, Descriptors(*fds), parent)
                workers |= {answer} if answer > 0 else set()
            else:
                workers.discard(request.subject)
                if request.task == Task.FORGET:
                    forgotten.add(request.subject)
                    continue
                answer = _reap(request.subject)
            with suppress(OSError):  # gone; the next poll says so
                end.sendall(REPLY.pack(request.number, answer))


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(end: socket.socket, request: Request, descriptors: Descriptors, parent: int) -> int:
    """The worker's process id, or -errno. In the worker this does not return."""
    sys.stdout.flush()  # what the user's start-up code wrote is written once
    sys.stderr.flush()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's threads, if it has any, know what to do about a fork
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


def _become_worker(request: Request, descriptors: Descriptors, parent: int) -> None:
    os.setsid()  # ended with all that it starts; Ctrl-C in a terminal reaches the parent only
    os.dup2(descriptors.stdout, 1)
    os.dup2(descriptors.stderr, 2)
    os.close(descriptors.stdout)
    os.close(descriptors.stderr)
    faults.rank = request.subject
    faults.point("worker.start")
    for fd in descriptors[:3]:
        os.set_inheritable(fd, False)
    numpy.random.seed()  # each its own, as Python's
    process = SpawnProcess(  # what the user starts in it is spawned: it has threads, like any process that computes
        target=loop.main,
        args=(Connection(descriptors.connection), request.subject, request.world_size, request.threads),
        name=f"batchopt-worker-{request.subject}",
        daemon=False,
    )
    process._parent_pid = parent  # type: ignore[attr-defined]
    process._parent_name = _parent_name()  # type: ignore[attr-defined]
    process._bootstrap(parent_sentinel=descriptors.parent_alive)  # type: ignore[attr-defined]


def _parent_name() -> str:
    mother = multiprocessing.parent_process()
    return mother.name if mother is not None else "MainProcess"
