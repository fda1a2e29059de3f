"""Keeps worker processes alive: starts them, sends them the state that they need, watches them, replaces them.

The desired state is recorded: the roster lists the workers that should exist, and `_state` the calls, by name, that
each of them must have been sent. Every turn compares the actual state with it and makes up the difference. So a worker
that died, a new one, and an interrupt while sending are one case.

The life of a worker: `_start_missing` forks it; its handshake shows that it has the same versions; `_sync` sends it all
of the state; once it has answered all of that it has joined, and gets orders. It is lost when its pipe or its process
ends, or when it is killed (because it hangs, violates the protocol, or could not take over the state). In each case
`_reap` reads its last replies, ensures that nothing of it remains, and notifies the listener, which gives its chunks to
others. The next turn starts a new worker, as long as the roster allows.
"""

from __future__ import annotations

import os
import select
import selectors
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn

from batchopt.backends.base import WorkerInfo
from batchopt.backends.patience import OTHERS, Presence, later
from batchopt.backends.process.channel import ProtocolError, WorkerReply
from batchopt.backends.process.roster import BusyWorker, Roster, check, unsent
from batchopt.backends.process.worker import (
    Activity,
    Ignore,
    Listener,
    PendingMessage,
    SessionCall,
    WorkerProcess,
    error_of,
)
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerStartError
from batchopt_workers.process.failures import Failure
from batchopt_workers.process.messages import Kind, versions

# Seconds in which a worker has to end by itself once the parent has closed its pipe.
GRACE = 1.0
# Seconds between the end of a worker's pipe and of its process, if that is what ended the pipe.
HANGING_UP = 0.1

# The seconds without progress after which a worker that was sent this message counts as hung.
Allowance = Callable[[WorkerProcess, PendingMessage], float]


class Pool:
    """The worker processes of the ranks in a roster, and the state that each must have been sent."""

    def __init__(self, make: Callable[[int], WorkerProcess], restarts: int, allowance: Allowance) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self.roster = Roster(restarts)
        self._make, self._allowance = make, allowance
        self._state: dict[str, tuple[SessionCall, ...]] = {}
        self.kept: dict[str, object] = {}  # the values that some of these calls were made of
        self._selector = selectors.DefaultSelector()
        self._ends = selectors.DefaultSelector()  # the same without the workers' pipes
        self._check_at = 0.0
        self.changes = 0  # how often a worker has joined or was lost: then orders are assigned again
        # How often something was sent, or has changed: then a previous finding that all is calm is out of date.
        self.stamp = 0
        self._stopped = False
        self._presence = Presence()
        self._amiss = True  # whether the actual state may differ from the desired one
        self._shut_down = util.Finalize(self, _shut_down, (self.workers, self._selector, self._ends), exitpriority=100)

    # ---- desired state

    def resize(self, infos: list[WorkerInfo]) -> None:
        """Have a worker for each of `infos`, and wait until each can work; a new info gets a new worker.

        Raises `WorkerStartError` if one ends before, `WorkerError` if the user's code raises in one.
        """
        new, ending = self.roster.resize(infos)
        self._amiss = True
        self.changes += 1
        self.stamp += 1
        for rank in ending:
            if rank in self.workers:
                worker = self.workers.pop(rank)
                self._unwatch(worker)
                _end([worker])
        until = float("inf")
        while True:
            failed = [info.rank for info in new if info.rank in self.roster.given_up]
            if failed:
                until = min(until, time.monotonic() + OTHERS)
            if self._complete or len(failed) == len(new) > 0 or time.monotonic() >= until:
                break
            try:
                self.pump(Ignore(), until)
            except AllWorkersLostError:
                if not new:
                    raise
        if failed:
            raise self.roster.given_up[failed[0]]

    def wait(self) -> None:
        """Wait until every worker that is not abandoned can work and has nothing left to do. A worker that was killed
        while another one did its work may be noticed only now."""
        while not self._complete or not all(worker.idle for worker in self.workers.values()):
            self.pump(Ignore(), float("inf"))

    @property
    def _complete(self) -> bool:
        return self.roster.is_complete([rank for rank, worker in self.workers.items() if worker.joined])

    def set_state(self, name: str, *calls: SessionCall) -> None:
        """Set the desired state `name`: every worker, present or future, is sent `calls` in place of the previous
        ones."""
        self._amiss = True
        self.stamp += 1
        others = {key: sent for key, sent in self._state.items() if key != name}
        self._state = {**others, name: calls}  # new workers are sent all in the order in which the others were
        self._sync()

    def keep(self, name: str, value: object, make: Callable[[], SessionCall]) -> None:
        """Set the desired state `name` to a call made of `value`, if the value has changed."""
        if name in self.kept and self.kept[name] == value:
            return
        self.kept.pop(name, None)  # an interrupt may come before or after the call is sent
        self.set_state(name, make())
        self.kept[name] = value

    def resend(self, name: str) -> None:
        """Send every worker the state of this name once more, if there is any."""
        if name in self._state:
            self.set_state(name, *self._state[name])

    def set_after(self, name: str) -> list[str]:
        """Return the names of the states that were set after this one, in order: they may depend on it."""
        names = [*self._state]
        return names[names.index(name) + 1 :] if name in self._state else []

    @property
    def available(self) -> list[WorkerProcess]:
        """The workers that can work and evaluate nothing now."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.joined and worker.free]

    @property
    def is_calm(self) -> bool:
        """Tell whether nothing needs reconciling and no worker has anything to do."""
        return not self._amiss and all(worker.calm for worker in self.workers.values())

    def watched(self, waking: int) -> select.epoll:
        """Return an epoll of every worker's pipe and exit, and of `waking`."""
        found = select.epoll()
        found.register(waking, select.EPOLLIN)
        for worker in self.workers.values():
            found.register(worker.channel.fileno(), select.EPOLLIN)
            found.register(worker.process.sentinel, select.EPOLLIN)
        return found

    def enter(self) -> None:
        """Begin a call: reconcile the workers with the desired state, and stop evaluations that were abandoned.

        Raises `AllWorkersLostError` if there is no worker and will be none.
        """
        if self.is_calm:
            return
        for worker in list(self.workers.values()):
            self._watch(worker)
            self.receive(worker, Ignore())  # replies that were read before an interrupt: no event announces them
        self.call_off()
        self._end_functions()
        self.pump(Ignore(), 0.0)

    def _end_functions(self) -> None:
        """Replace workers that are still running a function that was abandoned after an interrupt or a loss."""
        until = time.monotonic() + GRACE
        while left := [
            worker for worker in self.workers.values() if worker.asked and worker.asked.activity is Activity.FUNCTION
        ]:
            if time.monotonic() < until:
                self.pump(Ignore(), until)
                continue
            for worker in left:
                worker.kill("was running an abandoned function")
                self._reap(worker, Ignore())
            return

    def call_off(self) -> None:
        """Tell workers that evaluate to stop after the current chunk."""
        for worker in self.workers.values():
            if not worker.idle and worker.asked is not None and worker.asked.activity is Activity.EVALUATING:
                with suppress(OSError):
                    worker.limit(0)

    def finish(self, listener: Listener) -> None:
        """Wait until no worker evaluates anything, and pass replies to `listener`. Workers that still do when this is
        interrupted are killed."""
        try:
            self.call_off()
            while not all(worker.free for worker in self.workers.values()):
                self.pump(listener, float("inf"))
        except BaseException:
            for worker in list(self.workers.values()):
                if not worker.free:
                    worker.kill("was making an abandoned step")
                    self._reap(worker, Ignore())
            raise

    # ---- actual state

    def pump(self, listener: Listener, until: float) -> None:
        """Take one turn: reconcile, wait for an event (or until that time), pass replies and losses to `listener`.

        Raises `BatchoptError` once this was stopped.
        """
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")
        if self._amiss:
            self._replenish()
            self._sync()
            self._amiss = self.roster.is_amiss(self.workers)
        for worker in self.workers.values():
            if worker.writing != worker.channel.pending:  # the rest of its messages waits for room in the pipe
                self._listen(worker)
        for key in self._wait(max(0.0, min(until, self._check_at) - time.monotonic())):
            if key.data is None:
                os.read(key.fd, 4096)
                continue
            worker, is_exit = key.data
            if self.workers.get(worker.rank) is not worker:  # reaped earlier in this turn
                continue
            gone = is_exit
            try:
                worker.channel.flush()
                worker.channel.receive()
            except (EOFError, OSError):
                gone = True
            if gone:
                # What it had reported before it died counts: its rows are in memory that this process shares.
                worker.channel.drain()
                worker.process.join(HANGING_UP)  # a process that ends closes its pipe a moment before
                if not worker.process.ended:
                    worker.kill("closed its pipe")
            self.receive(worker, listener)
            if gone and self.workers.get(worker.rank) is worker:
                self._reap(worker, listener)
        # Their DONE was announced on the waking pipe; their own pipes are not watched now.
        for worker in list(self.workers.values()):
            if worker.quiet:
                worker.channel.drain()
                self.receive(worker, listener)
        if time.monotonic() >= self._check_at:
            self._look_for_hung(listener)

    def _wait(self, timeout: float) -> list[selectors.SelectorKey]:
        """Return the events within `timeout` seconds."""
        waits = any(not (worker.idle or worker.quiet) or worker.writing for worker in self.workers.values())
        selector = self._selector if waits else self._ends
        events = selector.select(timeout)
        away = self._presence.away(timeout)
        # Time during which this process was stopped does not count as a worker's silence.
        if away:
            for worker in self.workers.values():
                worker.since = later(worker.since, away)
            events = selector.select(0.0)  # if this process was stopped while it waited, there may be later events
        return [key for key, _ in events]

    def receive(self, worker: WorkerProcess, listener: Listener) -> None:
        """Handle all replies of the worker."""
        try:
            for reply in worker.channel.replies():
                worker.since = time.monotonic()
                asked = worker.find(reply.number)
                if asked is None:
                    continue
                if reply.kind is Kind.READY:
                    self._shook_hands(worker, reply)
                elif asked.state is not None and reply.kind is Kind.FAILED:
                    self._refused(worker, asked, reply)
                elif asked.state is None:
                    listener.on_reply(worker, asked, reply)
                worker.forget_answered()
        except ProtocolError as error:
            worker.kill(f"sent an invalid message ({error})")
            self._reap(worker, listener)
            return
        # It has answered every part of the state: from now on it gets orders.
        if not worker.joined and worker.sent.keys() >= self._state.keys() and worker.idle:
            worker.joined = True
            self.changes += 1
            self.stamp += 1
            self.roster.joined(worker.rank)

    def _shook_hands(self, worker: WorkerProcess, reply: WorkerReply) -> None:
        theirs = reply.body.decode("utf-8", "replace")
        # Pickles, bits and messages are equal only between equal versions.
        if theirs != versions():
            error = WorkerStartError(
                f"{worker.process.name} runs with {theirs}, this process with {versions()}: was something installed "
                "meanwhile? Restart the program"
            )
            self.roster.refused(worker.rank, error)
            worker.kill("has other versions")

    def _refused(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """Handle a failure to take over a state. A worker that has joined before can still be used; a new one
        cannot."""
        assert asked.state is not None
        if self._state.get(asked.state) is not asked.calls:  # another state is desired by now
            return
        self._amiss = True
        worker.sent.pop(asked.state, None)
        worker.synced_with = None
        worker.forget_answered()  # it must not be handled again after the exception
        error = error_of(worker.rank, Failure.decode(reply.body), asked.activity)
        if worker.joined:
            raise error
        self.roster.refused(worker.rank, error)
        worker.kill(f"could not start ({error})")

    def _look_for_hung(self, listener: Listener) -> None:
        now, working = time.monotonic(), []
        for worker in self.workers.values():
            worker.stderr.pass_on()
            asked = worker.asked
            if asked is not None:
                killed_at = worker.killed_at if worker.verdict else None
                working.append(BusyWorker(worker.rank, worker.since, self._allowance(worker, asked), killed_at))
        hung, dead, self._check_at = check(working, now)
        for progress in hung:
            worker = self.workers[progress.rank]
            doing = "" if worker.asked is None else worker.asked.activity.value
            worker.kill(f"made no progress for {progress.allowance:.3g} s while {doing}", hung=True)
        for rank in dead:
            self._reap(self.workers[rank], listener)

    def _reap(self, worker: WorkerProcess, listener: Listener) -> None:
        """End a worker that is dead or not usable, and notify `listener`."""
        self._amiss = True
        self.changes += 1
        self.stamp += 1
        asked = worker.asked
        worker.reap()
        self._unwatch(worker)
        self.workers.pop(worker.rank, None)
        in_users_code = asked is not None and asked.activity is not Activity.STARTING
        ending = worker.ending()
        self.roster.ended(worker.rank, ending, worker.joined, in_users_code)
        worker.close()
        listener.on_lost(worker, ending)

    def _replenish(self) -> None:
        """Start missing workers, as far as the roster allows; if there is none at all, until there is one.

        Raises `AllWorkersLostError`.
        """
        self._start_missing()
        while not self.workers and self.roster.is_amiss(self.workers):
            self._start_missing()  # no process was available: each attempt counts
        self.roster.check_workers_are_left(self.workers)

    def _start_missing(self) -> None:
        for rank in self.roster.start(self.workers.keys()):
            try:
                worker = self._make(rank)
            except OSError as error:  # no process or descriptor available
                self.roster.not_started(rank, f"batchopt-worker-{rank} could not be made: {error}")
                continue
            self.roster.started(rank, worker.pid)
            self.workers[rank] = worker
            self._watch(worker)

    def _sync(self) -> None:
        """Send each worker the state that it lacks."""
        for worker in self.workers.values():
            if worker.synced_with is self._state:
                continue
            for name in unsent(self._state, worker.sent):
                calls = self._state[name]
                for call in calls:
                    worker.ask(call, name, calls)
                worker.sent[name] = calls
            worker.synced_with = self._state
            with suppress(OSError):  # the end of a worker is noticed elsewhere
                worker.flush()

    def wake_up_for(self, fd: int) -> None:
        """Make `pump` return when there is something to read from the pipe `fd`, which it empties."""
        for selector in (self._selector, self._ends):
            selector.register(fd, selectors.EVENT_READ, None)

    def _watch(self, worker: WorkerProcess) -> None:
        if worker.channel not in self._selector.get_map():
            self._selector.register(worker.channel, selectors.EVENT_READ, (worker, False))
        for selector in (self._selector, self._ends):
            if worker.process.sentinel not in selector.get_map():
                selector.register(worker.process.sentinel, selectors.EVENT_READ, (worker, True))

    def _listen(self, worker: WorkerProcess) -> None:
        """Watch for room in the worker's pipe while there is more to send."""
        worker.writing = worker.channel.pending
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.writing else 0)
        self._selector.modify(worker.channel, events, (worker, False))

    def _unwatch(self, worker: WorkerProcess) -> None:
        for selector in (self._selector, self._ends):
            for watched in (worker.channel, worker.process.sentinel):
                with suppress(KeyError, ValueError):
                    selector.unregister(watched)

    def stop(self) -> None:
        """Make `pump` raise from now on."""
        self._stopped = True

    def close(self) -> None:
        """End the workers; those that are busy, or do not end by themselves, are killed."""
        self._shut_down()
        self._state, self.kept = {}, {}  # and with them the workers' memory
        self._make = self._allowance = _closed  # these are methods of an object that refers to this pool
        for info in self.roster.infos:
            info.alive = False


def _closed(*_: object) -> NoReturn:
    raise BatchoptError("these workers were ended")


def _end(workers: Iterable[WorkerProcess]) -> None:
    """Close the workers' pipes. Those that are busy, or do not end within the grace, are killed with all that they
    started."""
    workers = list(workers)
    for worker in workers:
        worker.close()
        if not (worker.joined and worker.idle):
            worker.process.kill_group()
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.reap()


def _shut_down(workers: dict[int, WorkerProcess], *waiting: selectors.BaseSelector) -> None:
    _end(workers.values())
    workers.clear()
    for selector in waiting:
        selector.close()
