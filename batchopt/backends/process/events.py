"""The events of worker processes: something to read from one, its end, or that workers have woken this process up."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Iterator
from contextlib import suppress

from batchopt.backends.process.worker import WorkerProcess
from batchopt.backends.timeouts import Presence, later


class Events:
    """Waits for events of the workers that it watches. Workers wake it up through `fd`, an event descriptor, which does
    not block."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd)
        self.poll = select.epoll()
        self.poll.register(self.fd, select.EPOLLIN)
        self._watched: dict[int, tuple[WorkerProcess, bool]] = {}  # and whether it is the descriptor of its exit
        self._presence = Presence()

    def watch(self, worker: WorkerProcess) -> None:
        """Watch the worker's pipe and its exit; twice is harmless."""
        for fd, is_exit in ((worker.channel.fileno(), False), (worker.process.sentinel, True)):
            if self._watched.get(fd, (None, False))[0] is not worker:
                self._watched[fd] = worker, is_exit
                with suppress(FileExistsError):  # after an interrupt
                    self.poll.register(fd, select.EPOLLIN)

    def unwatch(self, worker: WorkerProcess) -> None:
        """Watch it no more."""
        for fd in [fd for fd, (watched, _) in self._watched.items() if watched is worker]:
            with suppress(OSError):
                self.poll.unregister(fd)
            del self._watched[fd]

    def wait(self, timeout: float) -> Iterator[tuple[WorkerProcess, bool]]:
        """Yield the workers with events within `timeout` seconds, and whether it is their exit."""
        for fd, (worker, is_exit) in self._watched.items():
            if not is_exit and worker.channel.has_unsent:
                self.poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        events = self.poll.poll(timeout)
        away = self._presence.away(timeout)
        # Time during which this process was stopped does not count as a worker's silence.
        if away:
            for worker in {worker for worker, _ in self._watched.values()}:
                worker.since = later(worker.since, away)
            events = self.poll.poll(0.0)  # if this process was stopped while it waited, there may be later events
        for fd, event in events:
            if fd == self.fd:
                os.eventfd_read(fd)
            elif fd in self._watched:  # else it was reaped since
                if event & select.EPOLLOUT:
                    self.poll.modify(fd, select.EPOLLIN)
                yield self._watched[fd]

    def close(self) -> None:
        """Wait for nothing any more, and forget the workers, which refer to this object, too."""
        self.poll.close()
        self._watched.clear()
