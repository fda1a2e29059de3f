"""Keeps worker processes alive: starts them, tells them what they must know, watches them, replaces them.

What should be is written down: the roster says which workers there should be, and `_state` by name what each of them
must have been sent. At every turn the actual state is compared with that, and the difference is made up. So a worker
that died, a new one, and an interrupt in the middle of sending are one case.

The life of a worker: `_start_missing` forks it; its handshake shows that it runs with the same versions; `_sync` sends
it all of the state; once it has answered all of that it has joined, and is given orders. It dies when its pipe or its
process ends, or when it is killed (it hangs, it says nonsense, it could not take in the state); whichever way it was,
`_reap` takes in what it still said, sees to it that nothing of it is left, and tells the listener, which gives its
chunks to others. The next turn starts another one, as long as the roster allows.
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

# Seconds that a worker has to end by itself once the parent has hung up.
GRACE = 1.0
# Seconds between the end of a worker's pipe and of its process, if that is what ended the pipe.
HANGING_UP = 0.1

# The seconds without progress after which a worker that was asked this counts as hung.
Allowance = Callable[[WorkerProcess, PendingMessage], float]


class Pool:
    """The worker processes of the ranks in a roster, and the state that each must have been sent."""

    def __init__(self, make: Callable[[int], WorkerProcess], restarts: int, allowance: Allowance) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self.roster = Roster(restarts)
        self._make, self._allowance = make, allowance
        self._state: dict[str, tuple[SessionCall, ...]] = {}
        self.kept: dict[str, object] = {}  # what some of these calls were made of
        self._selector = selectors.DefaultSelector()
        self._ends = selectors.DefaultSelector()  # the same without the workers' pipes
        self._check_at = 0.0
        self.changes = 0  # how often a worker has joined or was lost: whoever gives out orders looks again
        # How often something was sent, or has changed: what was seen to be calm is then looked at again.
        self.stamp = 0
        self._stopped = False
        self._presence = Presence()
        self._amiss = True  # whether something may not be as it should be
        self._shut_down = util.Finalize(self, _shut_down, (self.workers, self._selector, self._ends), exitpriority=100)

    # ---- what should be

    def resize(self, infos: list[WorkerInfo]) -> None:
        """Have a worker for each of `infos`, and wait until each can work; those whose info is new are started afresh.

        Raises `WorkerStartError` for one that ends before, `WorkerError` if the user's code raises in one.
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
        """Wait until every worker that will ever work can work, and has nothing left to do: one that was killed while
        another one did its work may not be seen to be gone before."""
        while not self._complete or not all(worker.idle for worker in self.workers.values()):
            self.pump(Ignore(), float("inf"))

    @property
    def _complete(self) -> bool:
        return self.roster.is_complete([rank for rank, worker in self.workers.items() if worker.joined])

    def set_state(self, name: str, *calls: SessionCall) -> None:
        """Let every worker have been sent `calls`, in place of what was sent by this name before: those that are there
        now, and those that come later."""
        self._amiss = True
        self.stamp += 1
        others = {key: sent for key, sent in self._state.items() if key != name}
        self._state = {**others, name: calls}  # new workers are sent it in the order in which the others were
        self._sync()

    def keep(self, name: str, value: object, make: Callable[[], SessionCall]) -> None:
        """The same with the call that is made of `value`, if that is another one than before."""
        if name in self.kept and self.kept[name] == value:
            return
        self.kept.pop(name, None)  # an interrupt in between may come before or after it was sent
        self.set_state(name, make())
        self.kept[name] = value

    def resend(self, name: str) -> None:
        """Send every worker once more what it was sent by this name, if it was sent anything."""
        if name in self._state:
            self.set_state(name, *self._state[name])

    @property
    def available(self) -> list[WorkerProcess]:
        """The workers that evaluate nothing now, and can."""
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
        """Begin a call: make up for what is not as it should be, and call off evaluations that nobody waits for any
        more.

        Raises `AllWorkersLostError` if there is no worker and will be none.
        """
        if self.is_calm:
            return
        for worker in list(self.workers.values()):
            self._watch(worker)
            self.receive(worker, Ignore())  # what an interrupt left unheard: no event will come for it
        self.call_off()
        self._end_functions()
        self.pump(Ignore(), 0.0)

    def _end_functions(self) -> None:
        """Replace workers that are still in a function which an interrupt or a loss has left behind."""
        until = time.monotonic() + GRACE
        while left := [
            worker for worker in self.workers.values() if worker.asked and worker.asked.activity is Activity.FUNCTION
        ]:
            if time.monotonic() < until:
                self.pump(Ignore(), until)
                continue
            for worker in left:
                worker.kill("was left in a function that nobody waits for")
                self._reap(worker, Ignore())
            return

    def call_off(self) -> None:
        """Tell workers that evaluate to stop after the present chunk."""
        for worker in self.workers.values():
            if not worker.idle and worker.asked is not None and worker.asked.activity is Activity.EVALUATING:
                with suppress(OSError):
                    worker.limit(0)

    def finish(self, listener: Listener) -> None:
        """Wait until nobody evaluates anything, and tell `listener` what they say. Whoever still does when that is
        interrupted is killed."""
        try:
            self.call_off()
            while not all(worker.free for worker in self.workers.values()):
                self.pump(listener, float("inf"))
        except BaseException:
            for worker in list(self.workers.values()):
                if not worker.free:
                    worker.kill("was left at a step that nobody waits for")
                    self._reap(worker, Ignore())
            raise

    # ---- what is

    def pump(self, listener: Listener, until: float) -> None:
        """Take one turn: make up for what is amiss, wait until something happens (or until that time), tell `listener`.

        Raises `BatchoptError` once this was stopped.
        """
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")
        if self._amiss:
            self._replenish()
            self._sync()
            self._amiss = self.roster.is_amiss(self.workers)
        for worker in self.workers.values():
            if worker.writing != worker.channel.pending:  # what its pipe did not take waits for room
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
                worker.process.join(HANGING_UP)  # it ends a moment after its pipe, if that is how it ends
                if not worker.process.ended:
                    worker.kill("closed its pipe")
            self.receive(worker, listener)
            if gone and self.workers.get(worker.rank) is worker:
                self._reap(worker, listener)
        # Their DONE was announced on the waking pipe, not on theirs, which is not watched meanwhile.
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
        # Time in which this process was stopped is nobody's silence.
        if away:
            for worker in self.workers.values():
                worker.since = later(worker.since, away)
            events = selector.select(0.0)  # a wait in which this process was stopped misses what has come since
        return [key for key, _ in events]

    def receive(self, worker: WorkerProcess, listener: Listener) -> None:
        """Deal with everything that came from the worker."""
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
            worker.kill(f"said what is no message ({error})")
            self._reap(worker, listener)
            return
        # It has answered every part of the state: from now on it is given orders.
        if not worker.joined and worker.sent.keys() >= self._state.keys() and worker.idle:
            worker.joined = True
            self.changes += 1
            self.stamp += 1
            self.roster.joined(worker.rank)

    def _shook_hands(self, worker: WorkerProcess, reply: WorkerReply) -> None:
        theirs = reply.body.decode("utf-8", "replace")
        # Pickles, bits and messages are only the same between equal versions.
        if theirs != versions():
            error = WorkerStartError(
                f"{worker.process.name} runs with {theirs}, this process with {versions()}: was something installed "
                "meanwhile? Restart the program"
            )
            self.roster.refused(worker.rank, error)
            worker.kill("has other versions")

    def _refused(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """The worker could not take in what it was sent. One that worked before can be used on; a new one cannot."""
        assert asked.state is not None
        if self._state.get(asked.state) is not asked.calls:  # something else is to be sent by now
            return
        self._amiss = True
        worker.sent.pop(asked.state, None)
        worker.synced_with = None
        worker.forget_answered()  # raising must not let it be handled again
        error = error_of(worker.rank, Failure.decode(reply.body), asked.activity)
        if worker.joined:
            raise error
        self.roster.refused(worker.rank, error)
        worker.kill("could not start")

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
        """Bring a worker that is dead, or as good as, to its end, and tell `listener`."""
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
        """Start what is missing, as far as it is allowed; where there is nobody, until one is there or none may be.

        Raises `AllWorkersLostError`.
        """
        self._start_missing()
        while not self.workers and self.roster.is_amiss(self.workers):
            self._start_missing()  # no process was to be had: each attempt counts
        self.roster.check_somebody_is_left(self.workers)

    def _start_missing(self) -> None:
        for rank in self.roster.start(self.workers.keys()):
            try:
                worker = self._make(rank)
            except OSError as error:  # no process or no descriptor to be had
                self.roster.not_started(rank, f"batchopt-worker-{rank} could not be made: {error}")
                continue
            self.roster.started(rank, worker.pid)
            self.workers[rank] = worker
            self._watch(worker)

    def _sync(self) -> None:
        """Send each worker what it was not sent yet."""
        for worker in self.workers.values():
            if worker.synced_with is self._state:
                continue
            for name in unsent(self._state, worker.sent):
                calls = self._state[name]
                for call in calls:
                    worker.ask(call, name, calls)
                worker.sent[name] = calls
            worker.synced_with = self._state
            with suppress(OSError):  # a worker that is gone is found out elsewhere
                worker.flush()

    def wake_up_for(self, fd: int) -> None:
        """Let `pump` return when there is something to read from `fd`, a pipe, which it empties."""
        for selector in (self._selector, self._ends):
            selector.register(fd, selectors.EVENT_READ, None)

    def _watch(self, worker: WorkerProcess) -> None:
        if worker.channel not in self._selector.get_map():
            self._selector.register(worker.channel, selectors.EVENT_READ, (worker, False))
        for selector in (self._selector, self._ends):
            if worker.process.sentinel not in selector.get_map():
                selector.register(worker.process.sentinel, selectors.EVENT_READ, (worker, True))

    def _listen(self, worker: WorkerProcess) -> None:
        """Let an event come when its pipe takes more, if there is more."""
        worker.writing = worker.channel.pending
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.writing else 0)
        self._selector.modify(worker.channel, events, (worker, False))

    def _unwatch(self, worker: WorkerProcess) -> None:
        for selector in (self._selector, self._ends):
            for watched in (worker.channel, worker.process.sentinel):
                with suppress(KeyError, ValueError):
                    selector.unregister(watched)

    def stop(self) -> None:
        """Let `pump` raise from now on."""
        self._stopped = True

    def close(self) -> None:
        """End the workers; those that are busy, or do not end by themselves, are killed."""
        self._shut_down()
        self._state, self.kept = {}, {}  # and with them the memory that workers were given
        self._make = self._allowance = _closed  # these are methods of an object that refers to this pool
        for info in self.roster.infos:
            info.alive = False


def _closed(*_: object) -> NoReturn:
    raise BatchoptError("these workers were ended")


def _end(workers: Iterable[WorkerProcess]) -> None:
    """Hang up on workers. Those that are busy, or do not end within the grace, are killed with all that they
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
