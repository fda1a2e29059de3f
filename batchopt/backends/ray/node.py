"""The workers of one machine as the driver sees them: an actor, what it was told, and what it was asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from batchopt import errors
from batchopt.backends.ray.actor import Failed, Host, Request
from batchopt.backends.ray.cluster import Needs
from batchopt.errors import RemoteTraceback, WorkerError
from batchopt_workers.watch import StateWritten

# The thread of the actor that answers while the other one works.
ASIDE = "aside"


@dataclass
class Call:
    """Something that was asked of a machine: `what`, of which evaluation and share, when, and since when we wait for it."""

    what: str
    evaluation: int = -1
    attempt: int = -1
    since: float = field(default_factory=time.monotonic)
    silent: float = field(default_factory=time.monotonic)


@dataclass
class Known:
    """What a machine was told: any of these is compared with what it should know."""

    hooked: bool = True
    torch: object = None
    load: object = None
    shipment: object = None
    cut: object = None
    direction: object = None
    x: object = None
    edition: object = None
    program: bytes = b""  # but for its tensors, whose digests are
    tensors: frozenset[bytes] = frozenset()
    earlier_tensors: frozenset[bytes] = frozenset()  # before it was told of the present ones
    samples: list[range] = field(default_factory=list)


class Machine:
    """`ranks` of the workers, on the machine `node`; `number` tells it from all others before and after."""

    def __init__(self, ray: ModuleType, number: int, node: str, ranks: tuple[int, ...], needs: Needs) -> None:
        self._ray = ray
        self.number, self.ranks = number, ranks
        self.name = node[:8]
        self._epoch = self._sent = 0  # of requests that build on each other, and how many of them were sent
        self.ready = False
        self.known = Known()
        self.restarts: dict[int, int] = {}  # of its workers there, by rank
        self.calls: dict[Any, Call] = {}  # by the reference of the answer
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        remote = ray.remote(concurrency_groups={ASIDE: 1}, max_restarts=0, max_task_retries=0)(Host)
        self._actor = remote.options(scheduling_strategy=affinity, **needs.options(len(ranks))).remote()

    def greet(self) -> None:
        """Ask for its versions and name."""
        self._note(self._actor.greet.remote(), Call("greet"))

    def work(self, call: Call, news: Sequence[Request], task: Request, *bulk: Any) -> None:
        """Ask it to take in `news` and do `task`; `bulk` may be a reference."""
        place = self._epoch, self._sent
        self._sent += 1
        self._note(self._actor.work.remote(place, news, task, *bulk), call)

    def forget(self) -> None:
        """What it knows is not known any more: it will be told everything, but for tensors that it certainly has."""
        self.known = Known(tensors=self.known.tensors & self.known.earlier_tensors)
        self._epoch, self._sent = self._epoch + 1, 0

    def ask(self, question: str, about: Call, seconds: float) -> None:
        """Ask it something about a share while it works."""
        answer = self._actor.ask.options(concurrency_group=ASIDE).remote(question, about.attempt, seconds)
        self._note(answer, Call(question, about.evaluation, about.attempt))

    def _note(self, reference: Any, call: Call) -> None:
        self.calls[reference] = call

    def at(self, what: str) -> Call | None:
        """The first call of this kind that it has not answered."""
        return next((call for call in self.calls.values() if call.what == what), None)

    def works_on(self, evaluation: int) -> Call | None:
        """The share of this evaluation that it has not answered."""
        mine = (call for call in self.calls.values() if call.what == "evaluate" and call.evaluation == evaluation)
        return next(mine, None)

    def kill(self) -> None:
        """End it, and its workers."""
        self.calls.clear()
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)

    def error(self, failed: Failed, doing: str) -> BaseException:
        """The exception that happened there."""
        arguments = failed.arguments
        if failed.name == StateWritten.__name__:
            return StateWritten(*arguments)
        if failed.name == "WorkerError":
            rank, *others = arguments
            error: BaseException = WorkerError(self.ranks[rank], *others)
        else:
            kind = getattr(errors, failed.name, None)
            if kind is None or not issubclass(kind, errors.BatchoptError):
                error = WorkerError(self.ranks[0], failed.name, str(arguments[0]), range(0), f"{doing} on {self.name}")
            else:
                error = kind(*arguments)
        if failed.trace:
            error.__cause__ = RemoteTraceback(failed.trace)
        return error
