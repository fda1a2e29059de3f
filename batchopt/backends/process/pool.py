"""Worker processes that are kept alive: started, told what they must know, watched, replaced.

What has to be is written down (how many workers, and by topic what each must have been told); what is, is compared with
it and mended at every turn. So a worker that died, one that is new, and an interrupt in the middle of telling are one
case.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn, TypeAlias

from batchopt.backends.base import WorkerInfo
from batchopt.backends.gather import Ignore, Listener
from batchopt.backends.patience import ATTEMPTS, OTHERS, Presence, later
from batchopt.backends.process.channel import ProtocolError, Reply
from batchopt.backends.process.worker import REAPING, Activity, Asked, Call, Child, error_of
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerLostError, WorkerStartError
from batchopt_workers.failures import Failure
from batchopt_workers.messages import Kind
from batchopt_workers.versions import versions

# Seconds that a worker has to end by itself once the parent has hung up.
GRACE = 1.0
# Seconds between two looks at who hangs.
INTERVAL = 0.25

# Seconds between the end of a worker's pipe and of its process, if that is what ended the pipe.
HANGING_UP = 0.1

# The seconds without progress after which a worker that was asked this counts as hung.
Allowance = Callable[[Child, Asked], float]


# Hears what workers say about what they were asked, other than that they took in a topic; and of those that are dead and
# reaped. Either method may raise `ProtocolError`: then that worker is not to be trusted, and is replaced.
ProcessListener: TypeAlias = Listener[Child, Asked, Reply]


class Pool:
    """`size` worker processes, of ranks 0, 1, …; `infos` says of each what the user may know."""

    def __init__(self, make: Callable[[int], Child], restarts: int, allowance: Allowance) -> None:
        self.children: dict[int, Child] = {}
        self.infos: list[WorkerInfo] = []
        self.ending = ""  # of the worker that was lost last
        self._make, self._restarts, self._allowance = make, restarts, allowance
        self._topics: dict[str, tuple[Call, ...]] = {}
        self._failures: Counter[int] = Counter()  # ends before joining, in a row
        self._given_up: dict[int, BaseException] = {}
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
        new = [info for info in infos if all(info is not other for other in self.infos)]
        for rank in {*range(len(infos), len(self.infos)), *(info.rank for info in new)}:
            self._given_up.pop(rank, None)
            self._failures.pop(rank, None)
            if rank in self.children:
                child = self.children.pop(rank)
                self._unwatch(child)
                _end([child])
        self._amiss = True
        self._restarts += len(new)  # the first start of each is none
        self.infos = infos
        until = float("inf")
        while True:
            failed = [info.rank for info in new if info.rank in self._given_up]
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
            raise self._given_up[failed[0]]

    def wait(self) -> None:
        """Until every worker that will ever work can work."""
        while not self._complete:
            self.pump(Ignore(), float("inf"))

    @property
    def _complete(self) -> bool:
        ranks = [info.rank for info in self.infos if info.rank not in self._given_up]
        everyone = all(rank in self.children and self.children[rank].joined for rank in ranks)
        return everyone and (len(ranks) > 0 or not self.infos)

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
            self._amiss = len(self.children) + len(self._given_up) < len(self.infos)
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
            self._failures[child.rank] = 0
            self.infos[child.rank].alive = True

    def _greeted(self, child: Child, reply: Reply) -> None:
        theirs = reply.body.decode("utf-8", "replace")
        if theirs != versions():
            self._given_up[child.rank] = WorkerStartError(
                f"{child.process.name} runs with {theirs}, this process with {versions()}: was something installed "
                "meanwhile? Start the program anew"
            )
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
        self._given_up.setdefault(child.rank, error)  # the first: what was told after it fails for that reason
        child.kill("could not start")

    def _look_for_hung(self, listener: ProcessListener) -> None:
        now = time.monotonic()
        self._check_at = now + INTERVAL
        for child in list(self.children.values()):
            child.stderr.pass_on()
            asked = child.asked
            if asked is None:
                continue
            seconds = self._allowance(child, asked)
            if child.verdict:  # killed before, and not gone: the kernel holds it
                if now >= child.killed_at + REAPING:
                    self._bury(child, listener)
            elif now >= child.since + seconds:  # its end will be an event as any other
                child.kill(f"made no progress for {seconds:.3g} s while {asked.activity.value}", hung=True)
            else:
                self._check_at = min(self._check_at, child.since + seconds)

    def _bury(self, child: Child, listener: ProcessListener) -> None:
        """The worker is dead, or as good as: see to it that it is, and tell `listener`."""
        self._amiss = True
        self.changes += 1
        asked = child.asked
        child.bury()
        self._unwatch(child)
        self.children.pop(child.rank, None)
        info = self.infos[child.rank]
        info.alive = False
        self.ending = child.ending()
        if not child.joined:
            in_users_code = asked is not None and asked.activity is not Activity.STARTING
            self._failed(info, for_good=in_users_code and info.restarts == 0)
        child.close()
        listener.lost(child, self.ending)

    def _failed(self, info: WorkerInfo, for_good: bool) -> None:
        """A worker ended before it could work."""
        self._failures[info.rank] += 1
        if self._failures[info.rank] >= ATTEMPTS or for_good:
            self._given_up.setdefault(info.rank, WorkerStartError(self.ending))

    def _replenish(self) -> None:
        """Start what is missing, as far as it is allowed; where there is nobody, until one is there or none may be.

        Raises `AllWorkersLostError`.
        """
        self._start_missing()
        while not self.children and len(self._given_up) < len(self.infos):
            self._start_missing()  # no process was to be had: each attempt counts
        if not self.children and self.infos:
            raise AllWorkersLostError(
                f"no worker is left, and none may be started: build a new BatchOptimizer. The last one lost: {self.ending}"
            ) from next(iter(self._given_up.values()))

    def _start_missing(self) -> None:
        for rank, info in enumerate(self.infos):
            info.lost = rank in self._given_up
            if rank in self.children or info.lost:
                continue
            if self._restarts <= 0:
                self._given_up[rank] = WorkerLostError(f"max_restarts is spent; the last worker lost: {self.ending}")
                continue
            self._restarts -= 1
            try:
                child = self._make(rank)
            except OSError as error:  # no process or no descriptor to be had
                self.ending = f"batchopt-worker-{rank} could not be made: {error}"
                self._failed(info, for_good=not info.pid)
                continue
            info.restarts += 1 if info.pid else 0
            info.pid = child.pid
            self.children[rank] = child
            self._watch(child)

    def _brief(self) -> None:
        """Tell each worker what it was not told yet."""
        for child in self.children.values():
            if child.knows is self._topics:
                continue
            for topic, calls in self._topics.items():
                if child.told.get(topic) is not calls:
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
        for info in self.infos:
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
