"""The roster of worker processes: which should exist, what each is at, and which are missing or abandoned. No input
or output.

    starting ──► started ──► ready ◄──► taking     all that it must have was sent and answered; more was sent
                               ▲ ▲
                               │ └────► called     it runs a function of the user
                               └──────► ordered    until its page says that it is done

    any of them ──► lost ──► starting, as another process; or abandoned: it failed too often, or nothing is left

The pool reports events to the roster and asks it what to do. What the pool can see at any time (which processes it has,
which of them can work) is not kept here again, but passed with each question: an interrupt between two statements
leaves nothing to repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import Enum

from batchopt.backends.base import WorkerInfo
from batchopt.backends.timeouts import ATTEMPTS
from batchopt.errors import AllWorkersLostError, WorkerLostError, WorkerStartError

# Seconds that a process may take to end after SIGKILL; one that the kernel holds longer is ignored.
REAPING = 2.0


class State(Enum):
    """The states of a worker."""

    STARTING = "it has not answered all that it was sent"
    STARTED = "it has, and is to be looked at: it may have all that it must have"
    READY = "it has all that it must have, and nothing to do"
    TAKING = "it was sent something that it must have; what it is ordered comes after that"
    CALLED = "it runs a function of the user"
    ORDERED = "it has an order, and has not said that it is done"


# By whether a worker has joined the others, what it has not answered, and whether it has an order that is not done.
STATES = {
    (False, "field", False): State.STARTING,
    (False, None, False): State.STARTED,
    (True, None, False): State.READY,
    (True, "field", False): State.TAKING,
    (True, "function", False): State.CALLED,
    (True, None, True): State.ORDERED,
    (True, "field", True): State.ORDERED,
    (True, "function", True): State.ORDERED,
}
# It can be given an order.
ORDERABLE = frozenset({State.READY, State.TAKING})
# It runs code of the user that nobody waits for any more, once a call has ended.
AT_WORK = frozenset({State.CALLED, State.ORDERED})
# It has said everything.
SILENT = frozenset({State.STARTED, State.READY})


class Roster:
    """The ranks that should exist: how often each has failed, which are abandoned, and the remaining restarts."""

    def __init__(self, restarts: int) -> None:
        self.infos: list[WorkerInfo] = []
        self.given_up: dict[int, BaseException] = {}
        self.ending = ""  # of the worker that was lost last
        self._restarts = restarts
        self._failures: Counter[int] = Counter()  # consecutive ends before it could work

    # ---- events

    def resize(self, infos: list[WorkerInfo]) -> tuple[list[WorkerInfo], set[int]]:
        """Set the workers that should exist. Return the new ones, and the ranks whose process has to end."""
        new = [info for info in infos if all(info is not other for other in self.infos)]
        ending = {*range(len(infos), len(self.infos)), *(info.rank for info in new)}
        for rank in ending:
            self.given_up.pop(rank, None)
            self._failures.pop(rank, None)
        self._restarts += len(new)  # the first start of each is not a restart
        self.infos = infos
        return new, ending

    def started(self, rank: int, pid: int) -> None:
        """Note that there is a process of this rank."""
        info = self.infos[rank]
        info.restarts += 1 if info.pid else 0
        info.pid = pid

    def not_started(self, rank: int, why: str) -> None:
        """Note that no process or descriptor was available."""
        self.ending = why
        self._failed(rank, for_good=not self.infos[rank].pid)

    def joined(self, rank: int) -> None:
        """Note that the worker has taken over the complete state."""
        self._failures[rank] = 0
        self.infos[rank].alive = True

    def refused(self, rank: int, error: BaseException) -> None:
        """Note that the worker cannot work, nor would another one. The first reason counts: later ones follow from
        it."""
        self.given_up.setdefault(rank, error)

    def ended(self, rank: int, ending: str, joined: bool, in_users_code: bool) -> None:
        """Note that the process is gone. One that ends in the user's code the first time is not tried again."""
        self.ending = ending
        self.infos[rank].alive = False
        if not joined:
            self._failed(rank, for_good=in_users_code and self.infos[rank].restarts == 0)

    def _failed(self, rank: int, for_good: bool) -> None:
        self._failures[rank] += 1
        if self._failures[rank] >= ATTEMPTS or for_good:
            self.given_up.setdefault(rank, WorkerStartError(self.ending))

    # ---- decisions

    def start(self, present: Collection[int]) -> Iterable[int]:
        """Yield the ranks to start if those `present` have a process; each takes a restart, and without any left the
        rank is abandoned."""
        for rank, info in enumerate(self.infos):
            info.lost = rank in self.given_up
            if rank in present or info.lost:
                continue
            if self._restarts <= 0:
                self.given_up[rank] = WorkerLostError(f"max_restarts is spent; the last worker lost: {self.ending}")
                continue
            self._restarts -= 1
            yield rank

    def is_amiss(self, present: Collection[int]) -> bool:
        """Tell whether a worker is missing that was not abandoned."""
        return len(present) + len(self.given_up) < len(self.infos)

    def is_complete(self, joined: Collection[int]) -> bool:
        """Tell whether every worker that will ever work has `joined`."""
        ranks = [info.rank for info in self.infos if info.rank not in self.given_up]
        return all(rank in joined for rank in ranks) and (len(ranks) > 0 or not self.infos)

    def check_workers_are_left(self, present: Collection[int]) -> None:
        """Raise `AllWorkersLostError` if no worker is `present` and none will be."""
        if not present and self.infos:
            raise AllWorkersLostError(
                "no worker is left, and none may be started: build a new BatchOptimizer. The last one lost: "
                f"{self.ending}"
            ) from next(iter(self.given_up.values()))
