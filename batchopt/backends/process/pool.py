"""Worker processes that are kept alive: started, told what they must know, watched, replaced.

What has to be is written down (how many workers, and by topic what each must have been told); what is, is compared with
it and mended at every turn. So a worker that died, one that is new, and an interrupt in the middle of telling are one
case.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn, TypeAlias

from batchopt.backends.base import WorkerInfo
from batchopt.backends.gather import Ignore, Listener
from batchopt.backends.patience import OTHERS, Presence, later
from batchopt.backends.process.channel import ProtocolError, Reply
from batchopt.backends.process.roster import Progress, Roster, check, unsent
from batchopt.backends.process.worker import Activity, Asked, Call, Child, error_of
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerStartError
from batchopt_workers.failures import Failure
from batchopt_workers.messages import Kind
from batchopt_workers.versions import versions

# Seconds that a worker has to end by itself once the parent has hung up.
GRACE = 1.0
# Seconds between the end of a worker's pipe and of its process, if that is what ended the pipe.
HANGING_UP = 0.1

# The seconds without progress after which a worker that was asked this counts as hung.
Allowance = Callable[[Child, Asked], float]


# Hears what workers say about what they were asked, other than that they took in a topic; and of those that are dead and
# reaped. Either method may raise `ProtocolError`: then that worker is not to be trusted, and is replaced.
ProcessListener: TypeAlias = Listener[Child, Asked, Reply]


class Pool:
    """The worker processes of the ranks in a roster, and what each must have been told."""

    def __init__(self, make: Callable[[int], Child], restarts: int, allowance: Allowance) -> None:
        self.children: dict[int, Child] = {}
        self.roster = Roster(restarts)
        self._make, self._allowance = make, allowance
        self._topics: dict[str, tuple[Call, ...]] = {}
        self._selector = selectors.DefaultSelector()
        self._check_at = 0.0
        self.changes = 0  # how often a worker has joined or was lost
        self._stopped = False
        self._presence = Presence()
        self._amiss = True  # whether something may not be as it has to be
        self._shut_down = util.Finalize(self, _shut_down, (self.children, self._selector), exitpriority=100)

    # ---- what has to be

    def resize(self, infos: list[WorkerInfo]) -> None:
        """Have as many workers as `infos`, and wait until each can work; those whose info is new start anew.

        Raises `WorkerStartError` for one that ends before, `WorkerError` if the user's code raises in one.
        """
        new, ending = self.roster.resize(infos)
        self._amiss = True
        for rank in ending:
            if rank in self.children:
                child = self.children.pop(rank)
                self._unwatch(child)
                _end([child])
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
        """Until every worker that will ever work can work."""
        while not self._complete:
            self.pump(Ignore(), float("inf"))

    @property
    def _complete(self) -> bool:
        return self.roster.is_complete([rank for rank, child in self.children.items() if child.joined])

    def tell(self, topic: str, *calls: Call) -> None:
        """From now on every worker must have been told `calls`, in place of what was told before of this topic."""
        self._amiss = True
        others = {name: told for name, told in self._topics.items() if name != topic}
        self._topics = {**others, topic: calls}  # a new worker is told in the order in which the others were
        self._brief()

    def tell_again(self, topic: str) -> None:
        """Tell every worker once more what it was told of this topic, if it was told anything."""
        if topic in self._topics:
            self.tell(topic, *self._topics[topic])

    @property
    def available(self) -> list[Child]:
        """The workers that evaluate nothing now, and can."""
        return [child for _, child in sorted(self.children.items()) if child.joined and child.free]

    def enter(self) -> None:
        """Mend what is not as it has to be, and call off evaluations that nobody waits for any more.

        Raises `AllWorkersLostError` if there is no worker and will be none.
        """
        if not self._amiss and all(child.calm for child in self.children.values()):
            return
        for child in list(self.children.values()):
            self._watch(child)
            self.hear(child, Ignore())  # what an interrupt left, which wakes nobody up
        self.call_off()
        self._end_functions()
        self.pump(Ignore(), 0.0)

    def _end_functions(self) -> None:
        """Replace workers that are still in a function which an interrupt or a loss has left behind."""
        until = time.monotonic() + GRACE
        while left := [
            child for child in self.children.values() if child.asked and child.asked.activity is Activity.FUNCTION
        ]:
            if time.monotonic() < until:
                self.pump(Ignore(), until)
                continue
            for child in left:
                child.kill("was left in a function that nobody waits for")
            return

    def call_off(self) -> None:
        """Let the workers end the evaluation that they are at after the present chunk."""
        for child in self.children.values():
            if not child.idle and child.asked is not None and child.asked.activity is Activity.EVALUATING:
                with suppress(OSError):
                    child.limit(0)

    # ---- what is

    def pump(self, listener: ProcessListener, until: float) -> None:
        """Mend, wait until something happens (or until that time), and tell `listener`. Raises `BatchoptError` once this was
        stopped."""
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")
        if self._amiss:
            self._replenish()
            self._brief()
            self._amiss = self.roster.is_amiss(self.children)
        for child in self.children.values():
            if child.writing != child.channel.pending:
                self._listen(child)
        for key in self._wait(max(0.0, min(until, self._check_at) - time.monotonic())):
            if key.data is None:
                os.read(key.fd, 4096)
                continue
            child, is_exit = key.data
            if self.children.get(child.rank) is not child:
                continue
            gone = is_exit
            try:
                child.channel.flush()
                child.channel.receive()
            except (EOFError, OSError):
                gone = True
            if gone:
                child.channel.drain()
                child.process.join(HANGING_UP)
                if not child.process.ended:
                    child.kill("closed its pipe")
            self.hear(child, listener)
            if gone and self.children.get(child.rank) is child:
                self._bury(child, listener)
        if time.monotonic() >= self._check_at:
            self._look_for_hung(listener)

    def _wait(self, timeout: float) -> list[selectors.SelectorKey]:
        """Who has something for us, after so many seconds at the most."""
        events = self._selector.select(timeout)
        away = self._presence.away(timeout)
        if away:
            for child in self.children.values():
                child.since = later(child.since, away)
            events = self._selector.select(0.0)  # a wait that was interrupted does not say what has come meanwhile
        return [key for key, _ in events]

    def hear(self, child: Child, listener: ProcessListener) -> None:
        """Deal with what came from the worker."""
        try:
            for reply in child.channel.replies():
                child.since = time.monotonic()
                asked = child.find(reply.number)
                if asked is None:
                    continue
                if reply.kind is Kind.READY:
                    self._greeted(child, reply)
                elif asked.topic is not None and reply.kind is Kind.FAILED:
                    self._refused(child, asked, reply)
                elif asked.topic is None:
                    listener.heard(child, asked, reply)
                child.forget_answered()
        except ProtocolError as error:
            child.kill(f"said what is no message ({error})")
            self._bury(child, listener)
            return
        if not child.joined and child.told.keys() >= self._topics.keys() and child.idle:
            child.joined = True
            self.changes += 1
            self.roster.joined(child.rank)

    def _greeted(self, child: Child, reply: Reply) -> None:
        theirs = reply.body.decode("utf-8", "replace")
        if theirs != versions():
            error = WorkerStartError(
                f"{child.process.name} runs with {theirs}, this process with {versions()}: was something installed "
                "meanwhile? Start the program anew"
            )
            self.roster.refused(child.rank, error)
            child.kill("has other versions")

    def _refused(self, child: Child, asked: Asked, reply: Reply) -> None:
        """The worker could not take in a topic."""
        assert asked.topic is not None
        if self._topics.get(asked.topic) is not asked.calls:  # something else is told by now
            return
        self._amiss = True
        child.told.pop(asked.topic, None)
        child.knows = None
        child.forget_answered()  # not to be heard again
        error = error_of(child.rank, Failure.decode(reply.body), asked.activity)
        if child.joined:
            raise error
        self.roster.refused(child.rank, error)
        child.kill("could not start")

    def _look_for_hung(self, listener: ProcessListener) -> None:
        now, working = time.monotonic(), []
        for child in self.children.values():
            child.stderr.pass_on()
            asked = child.asked
            if asked is not None:
                killed_at = child.killed_at if child.verdict else None
                working.append(Progress(child.rank, child.since, self._allowance(child, asked), killed_at))
        hung, dead, self._check_at = check(working, now)
        for progress in hung:
            child = self.children[progress.rank]
            doing = "" if child.asked is None else child.asked.activity.value
            child.kill(f"made no progress for {progress.allowance:.3g} s while {doing}", hung=True)
        for rank in dead:
            self._bury(self.children[rank], listener)

    def _bury(self, child: Child, listener: ProcessListener) -> None:
        """The worker is dead, or as good as: see to it that it is, and tell `listener`."""
        self._amiss = True
        self.changes += 1
        asked = child.asked
        child.bury()
        self._unwatch(child)
        self.children.pop(child.rank, None)
        in_users_code = asked is not None and asked.activity is not Activity.STARTING
        ending = child.ending()
        self.roster.ended(child.rank, ending, child.joined, in_users_code)
        child.close()
        listener.lost(child, ending)

    def _replenish(self) -> None:
        """Start what is missing, as far as it is allowed; where there is nobody, until one is there or none may be.

        Raises `AllWorkersLostError`.
        """
        self._start_missing()
        while not self.children and self.roster.is_amiss(self.children):
            self._start_missing()  # no process was to be had: each attempt counts
        self.roster.check_somebody_is_left(self.children)

    def _start_missing(self) -> None:
        for rank in self.roster.start(self.children.keys()):
            try:
                child = self._make(rank)
            except OSError as error:  # no process or no descriptor to be had
                self.roster.not_started(rank, f"batchopt-worker-{rank} could not be made: {error}")
                continue
            self.roster.started(rank, child.pid)
            self.children[rank] = child
            self._watch(child)

    def _brief(self) -> None:
        """Tell each worker what it was not told yet."""
        for child in self.children.values():
            if child.knows is self._topics:
                continue
            for topic in unsent(self._topics, child.told):
                calls = self._topics[topic]
                with suppress(OSError):  # a worker that is gone is found out elsewhere
                    for call in calls:
                        child.ask(call, topic, calls)
                child.told[topic] = calls
            child.knows = self._topics

    def wake_up_for(self, fd: int) -> None:
        """Let `pump` end when there is something to read from `fd`, a pipe; it is read there."""
        self._selector.register(fd, selectors.EVENT_READ, None)

    def _watch(self, child: Child) -> None:
        known = self._selector.get_map()
        if child.channel not in known:
            self._selector.register(child.channel, selectors.EVENT_READ, (child, False))
        if child.process.sentinel not in known:
            self._selector.register(child.process.sentinel, selectors.EVENT_READ, (child, True))

    def _listen(self, child: Child) -> None:
        """Wake up when its pipe takes more, if there is more."""
        child.writing = child.channel.pending
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.writing else 0)
        self._selector.modify(child.channel, events, (child, False))

    def _unwatch(self, child: Child) -> None:
        for watched in (child.channel, child.process.sentinel):
            with suppress(KeyError, ValueError):
                self._selector.unregister(watched)

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._stopped = True

    def close(self) -> None:
        """End the workers; those that are busy, or do not end by themselves, are killed."""
        self._shut_down()
        self._topics = {}  # and with them the memory that workers were told of
        self._make = self._allowance = _closed  # whose methods they are knows this pool
        for info in self.roster.infos:
            info.alive = False


def _closed(*_: object) -> NoReturn:
    raise BatchoptError("these workers were ended")


def _end(children: Iterable[Child]) -> None:
    """Hang up; workers that are busy, or do not end within the grace, are killed with all that they started."""
    children = list(children)
    for child in children:
        child.close()
        if not (child.joined and child.idle):
            child.process.kill_group()
    deadline = time.monotonic() + GRACE
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.bury()


def _shut_down(children: dict[int, Child], selector: selectors.BaseSelector) -> None:
    _end(children.values())
    children.clear()
    selector.close()
