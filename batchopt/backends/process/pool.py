"""Keeps worker processes alive: starts them, sends them the state that they need, watches them, replaces them.

The roster lists the workers that should exist, and `want` is what each of them must have (`wanted`). Every turn
compares that with what there is, and makes up the difference. So a worker that died, a new one, and an interrupt while
sending are one case.

The life of a worker is drawn in `roster`: `_start_missing` forks it; its handshake shows that it has the same versions;
`_sync` sends it all that it must have; once it has answered that it has joined, and gets orders. It is lost when its
pipe or its process ends, or when it is killed (it hangs, violates the protocol, or could not take over the state). Then
`_reap` reads its last replies, ensures that nothing of it remains, and notifies the listener, which gives its chunks to
others. The next turn starts a new worker, as long as the roster allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn

from batchopt.backends.base import WorkerInfo
from batchopt.backends.lacking import lacking
from batchopt.backends.process.channel import PendingCall, ProtocolError
from batchopt.backends.process.events import Events
from batchopt.backends.process.roster import AT_WORK, ORDERABLE, REAPING, SILENT, Roster, State
from batchopt.backends.process.wanted import AFTER, NOTHING, Activity, Field, SessionCall, Wanted, having
from batchopt.backends.process.worker import Listener, WorkerProcess, error_of
from batchopt.backends.timeouts import OTHERS
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerStartError
from batchopt_workers.wire.failures import Failure
from batchopt_workers.wire.orders import CHUNK, NONES, Message, versions
from batchopt_workers.wire.packets import Received
from batchopt_workers.wire.page import DONE, REPORTS, fence

# Seconds between two checks for hung workers.
INTERVAL = 0.25
# Seconds in which a worker has to end by itself once the parent has closed its pipe.
GRACE = 1.0
# Seconds between the end of a worker's connection and the news of its end, if that is what closed it.
HANGING_UP = 3.0

# The seconds without progress after which a worker that does this counts as hung.
Allowance = Callable[[WorkerProcess, Activity], float]
# A listener that ignores everything.
IGNORE = Listener()
_OF_ORDERS = frozenset({Message.HOOKED, Message.FORM, Message.FAILED, Message.SILENT})


class Pool:
    """The worker processes of the ranks in a roster, and what each must have."""

    def __init__(self, make: Callable[[int], WorkerProcess], restarts: int, allowance: Allowance) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self.roster, self.events = Roster(restarts), Events()
        self._make, self._allowance = make, allowance
        self.want = Wanted()
        self._check_at = 0.0
        self.changes = 0  # how often a worker has joined or was lost: then orders are assigned again
        # How often something was sent, or has changed: then a previous finding that all is settled is out of date.
        self.stamp = 0
        self._stopped = False
        self._amiss = True  # whether what there is may differ from what there should be
        self._shut_down = util.Finalize(self, _shut_down, (self.workers, self.events), exitpriority=100)

    # ---- what there should be

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
                self.events.unwatch(worker)
                _end([worker])
        until = float("inf")
        while True:
            failed = [info.rank for info in new if info.rank in self.roster.given_up]
            if failed:
                until = min(until, time.monotonic() + OTHERS)
            if self._complete or len(failed) == len(new) > 0 or time.monotonic() >= until:
                break
            try:
                self.pump(IGNORE, until)
            except AllWorkersLostError:
                if not new:
                    raise
        if failed:
            raise self.roster.given_up[failed[0]]

    def wait(self) -> None:
        """Wait until every worker that is not abandoned can work and has nothing left to do. A worker that was killed
        while another one did its work may be noticed only now."""
        while not self._complete or not all(worker.state in SILENT for worker in self.workers.values()):
            self.pump(IGNORE, float("inf"))

    @property
    def _complete(self) -> bool:
        return self.roster.is_complete([rank for rank, worker in self.workers.items() if worker.heard.joined])

    def tell(self, name: str, *calls: SessionCall) -> None:
        """Have every worker, present or future, make these calls for that field of what it must have."""
        self.tell_of(name, None, lambda: calls, anew=True)

    def tell_of(self, name: str, value: object, make: Callable[[], Sequence[SessionCall]], anew: bool = False) -> None:
        """Have every worker make calls for that field, made of a value, if the value has changed, or in any case."""
        field: Field = getattr(self.want, name)
        if not anew and field is not NOTHING and field.value == value:
            return
        self._amiss = True
        self.stamp += 1
        self.want = self.want._replace(**{name: Field(tuple(make()), value)})
        self._sync()

    def value_of(self, name: str) -> object:
        """Return the value of which that field was made; None if there is none."""
        field: Field = getattr(self.want, name)
        return field.value

    @property
    def available(self) -> list[WorkerProcess]:
        """The workers that can work, evaluate nothing now, and whose last report was taken in: pages do not say which
        order a report is about, so one that comes to light later would count for the next one."""
        workers = [worker for _, worker in sorted(self.workers.items()) if worker.state in ORDERABLE]
        return [worker for worker in workers if worker.heard.done == worker.given.number]

    @property
    def is_settled(self) -> bool:
        """Tell whether nothing needs reconciling and no worker has anything to do."""
        return not self._amiss and all(w.state is State.READY and w.is_heard for w in self.workers.values())

    def enter(self) -> None:
        """Begin a call: reconcile the workers with the desired state, and stop evaluations that were abandoned.

        Raises `AllWorkersLostError` if there is no worker and will be none.
        """
        if self.is_settled:
            return
        for worker in list(self.workers.values()):
            self.events.watch(worker)
            self.receive(worker, IGNORE)  # replies that were read before an interrupt: no event announces them
        self.call_off()
        self._end_functions()
        self.pump(IGNORE, 0.0)

    def _end_functions(self) -> None:
        """Replace workers that are still running a function that was abandoned after an interrupt or a loss."""
        until = time.monotonic() + GRACE
        while left := [worker for worker in self.workers.values() if worker.state is State.CALLED]:
            if time.monotonic() < until:
                self.pump(IGNORE, until)
                continue
            for worker in left:
                worker.kill("was running an abandoned function")
                self._reap(worker, IGNORE)
            return

    def call_off(self) -> None:
        """Have workers stop after the current chunk. What their pages say after this names no memory that they still
        write."""
        for worker in self.workers.values():
            if worker.evaluates:
                worker.call_off()
        fence()

    def finish(self, listener: Listener) -> None:
        """Wait until no worker evaluates anything, and pass what they say to `listener`. Workers that still do when
        this is interrupted are killed."""
        try:
            self.call_off()
            while any(worker.state in AT_WORK for worker in self.workers.values()):
                self.pump(listener, float("inf"))
        except BaseException:
            for worker in list(self.workers.values()):
                if worker.state in AT_WORK:
                    worker.kill("was making an abandoned step")
                    self._reap(worker, IGNORE)
            raise

    # ---- what there is

    def pump(self, listener: Listener, until: float) -> None:
        """Take one turn: reconcile, wait for an event (or until that time), pass what workers say, and losses, to
        `listener`.

        Raises `BatchoptError` once this was stopped.
        """
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")
        if self._amiss:
            self._replenish()
            self._sync()
            self._amiss = self.roster.is_amiss(self.workers)
        for worker, gone in self.events.wait(max(0.0, min(until, self._check_at) - time.monotonic())):
            try:
                worker.channel.flush()
                worker.channel.receive()
            except (EOFError, OSError):
                gone = True
            if gone:
                worker.process.join(HANGING_UP)  # it is reaped by another process a moment later
                if not worker.process.ended:
                    worker.kill("closed its pipe")
            self.receive(worker, listener)
            if gone and self.workers.get(worker.rank) is worker:
                self._reap(worker, listener)
        self.look(listener)
        if time.monotonic() >= self._check_at:
            self._look_for_hung(listener)

    def look(self, listener: Listener) -> None:
        """Take in what is new on the workers' pages."""
        for worker in list(self.workers.values()):
            self._look_at(worker, listener)

    def _look_at(self, worker: WorkerProcess, listener: Listener) -> None:
        ints, heard = worker.page.ints, worker.heard
        done, reports = ints[DONE], ints[REPORTS]  # in this order: after the end there is no other report
        if reports == heard.reports and done == heard.done:
            return
        worker.since = time.monotonic()
        with suppress(EOFError, OSError):
            worker.channel.receive()  # what it has said of its order before
        self.receive(worker, listener)
        try:
            if reports != heard.reports:
                heard.reports = reports
                listener.on_report(worker)
            if done != heard.done:
                heard.done = done
                listener.on_done(worker)
        except ProtocolError as error:
            self._distrust(worker, error, listener)

    def receive(self, worker: WorkerProcess, listener: Listener) -> None:
        """Handle all replies and messages of the worker."""
        try:
            for reply in worker.channel.replies():
                worker.since = time.monotonic()
                if reply.kind in _OF_ORDERS:
                    self._take_message(worker, reply, listener)
                    continue
                asked = worker.channel.find(reply.number)
                if asked is None:
                    continue
                if reply.kind is Message.READY:
                    self._shook_hands(worker, reply)
                elif asked.field is not None and reply.kind is Message.REFUSED:
                    self._refused(worker, asked, reply)
                elif asked.field is None:
                    listener.on_reply(worker, asked, reply)
                worker.channel.forget_answered()
        except ProtocolError as error:
            self._distrust(worker, error, listener)
            return
        # It has all that it must have: from now on it gets orders.
        if worker.state is State.STARTED and not any(lacking(worker.have, self.want, AFTER)):
            worker.heard.joined = True
            self.changes += 1
            self.stamp += 1
            self.roster.joined(worker.rank)

    def _take_message(self, worker: WorkerProcess, message: Received, listener: Listener) -> None:
        if message.kind is Message.SILENT:
            if len(message.body) != NONES.size:
                raise ProtocolError(f"a message of {len(message.body)} bytes about results of None")
            chunk, count = NONES.unpack(message.body)
            worker.heard.nones[chunk] = count
            return
        if message.kind is Message.FORM:
            worker.heard.form = message.body[CHUNK.size :]
        if message.number == worker.given.number:
            listener.on_message(worker, message)

    def _distrust(self, worker: WorkerProcess, error: ProtocolError, listener: Listener) -> None:
        worker.kill(f"sent an invalid message ({error})")
        self._reap(worker, listener)

    def _shook_hands(self, worker: WorkerProcess, reply: Received) -> None:
        theirs = reply.body.decode("utf-8", "replace")
        # Pickles, bits and messages are equal only between equal versions.
        if theirs != versions():
            error = WorkerStartError(
                f"{worker.process.name} runs with {theirs}, this process with {versions()}: was something installed "
                "meanwhile? Restart the program"
            )
            self.roster.refused(worker.rank, error)
            worker.kill("has other versions")

    def _refused(self, worker: WorkerProcess, asked: PendingCall, reply: Received) -> None:
        """Handle a failure to take over a field. A worker that has joined before can still be used; a new one
        cannot."""
        if getattr(self.want, asked.name) is not asked.field:  # it is to have another one by now
            return
        self._amiss = True
        worker.have = worker.have._replace(**{asked.name: NOTHING})
        worker.channel.forget_answered()  # it must not be handled again after the exception
        error = error_of(worker.rank, Failure.decode(reply.body), asked.activity)
        if worker.heard.joined:
            raise error
        self.roster.refused(worker.rank, error)
        worker.kill(f"could not start ({error})")

    def _look_for_hung(self, listener: Listener) -> None:
        now = time.monotonic()
        self._check_at = now + INTERVAL
        for worker in list(self.workers.values()):
            worker.stderr.pass_on()
            activity = worker.activity
            if activity is None:
                continue
            if worker.killed is not None:  # its end will be an ordinary event, unless the kernel holds it
                if now >= worker.killed.at + REAPING:
                    self._reap(worker, listener)
                continue
            allowance = self._allowance(worker, activity)
            if now >= worker.since + allowance:
                worker.kill(f"made no progress for {allowance:.3g} s while {activity.value}", hung=True)
            else:
                self._check_at = min(self._check_at, worker.since + allowance)

    def _reap(self, worker: WorkerProcess, listener: Listener) -> None:
        """End a worker that is dead or not usable, and notify `listener`."""
        if self.workers.get(worker.rank) is not worker:
            return
        self._amiss = True
        self.changes += 1
        self.stamp += 1
        activity = worker.activity
        worker.reap()
        self.events.unwatch(worker)
        del self.workers[worker.rank]
        self._look_at(worker, listener)
        ending = worker.ending()
        self.roster.ended(worker.rank, ending, worker.heard.joined, activity not in (None, Activity.STARTING))
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
            self.events.watch(worker)

    def _sync(self) -> None:
        """Send each worker what it lacks."""
        for worker in self.workers.values():
            if worker.have is self.want:  # equal calls may be about other elements in the same memory
                continue
            for name in lacking(worker.have, self.want, AFTER):
                field: Field = getattr(self.want, name)
                for call in field.calls:
                    worker.ask(call, name, field)
                worker.have = having(worker.have, name, field)
            worker.have = self.want
            worker.channel.flush()

    def stop(self) -> None:
        """Make `pump` raise from now on."""
        self._stopped = True

    def close(self) -> None:
        """End the workers; those that are busy, or do not end by themselves, are killed."""
        self._shut_down()
        self.want = Wanted()  # and with it the workers' memory
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
        if worker.state is not State.READY:
            worker.process.kill_group()
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.reap()


def _shut_down(workers: dict[int, WorkerProcess], events: Events) -> None:
    _end(workers.values())
    workers.clear()
    events.close()
