"""The workers of one machine as the driver sees them: an actor, what it was told, and what it was asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchopt.backends.ledger import Run
from batchopt.backends.ray.actor import Host
from batchopt.backends.ray.link import Link
from batchopt.backends.ray.messages import Envelope, Failed, Question, Reply, Request, Task
from batchopt.errors import RemoteTraceback, WorkerError

# The tasks that a share is for.
SHARES = (Task.EVALUATE, Task.PROBE)


class Released(NamedTuple):
    """A machine that was asked for some of a share gave up these runs."""

    runs: list[Run]


# What a machine can say.
Heard = Reply | Released


@dataclass
class Call:
    """Something that was asked of a machine: of which evaluation and share, when, and since when we wait for it."""

    task: Task | Question
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
    """`ranks` of the workers, on one machine; `number` tells it from all others before and after."""

    def __init__(self, link: Link, number: int, name: str, ranks: tuple[int, ...]) -> None:
        self.number, self.name, self.ranks = number, name, ranks
        self._link = link
        self._epoch = self._sent = 0  # of requests that build on each other, and how many of them were sent
        self.ready = False
        self.known = Known()
        self.restarts: dict[int, int] = {}  # of its workers there, by rank
        self.calls: dict[Any, Call] = {}  # by the reference of the answer

    def greet(self) -> None:
        """Ask for its versions and name."""
        self._note(self._link.call(Host.greet), Call(Task.HANDSHAKE))

    def work(self, call: Call, news: Sequence[Request], task: Request) -> None:
        """Ask it to take in `news` and do `task`."""
        envelope = Envelope(self._epoch, self._sent, news, task.method)
        self._sent += 1
        self._note(self._link.call(Host.work, envelope, *task.arguments), call)

    def forget(self) -> None:
        """What it knows is not known any more: it will be told everything, but for tensors that it certainly has."""
        self.known = Known(tensors=self.known.tensors & self.known.earlier_tensors)
        self._epoch, self._sent = self._epoch + 1, 0

    def ask(self, question: Question, about: Call, seconds: float) -> None:
        """Ask it something about a share while it works."""
        answer = self._link.call_aside(Host.ask, question, about.attempt, seconds)
        self._note(answer, Call(question, about.evaluation, about.attempt))

    def _note(self, reference: Any, call: Call) -> None:
        self.calls[reference] = call

    def at(self, *tasks: Task | Question) -> Call | None:
        """The first call of these kinds that it has not answered."""
        return next((call for call in self.calls.values() if call.task in tasks), None)

    def works_on(self, evaluation: int) -> Call | None:
        """The share of this evaluation that it has not answered."""
        mine = (call for call in self.calls.values() if call.task in SHARES and call.evaluation == evaluation)
        return next(mine, None)

    def kill(self) -> None:
        """End it, and its workers."""
        self.calls.clear()
        self._link.end()

    def error(self, failed: Failed, task: Task) -> BaseException:
        """The exception that happened there."""
        error, text = failed.error, failed.text
        if error is None:
            doing = f"{task.value} on {self.name}"
            error = WorkerError(self.ranks[0], text.type_name, text.message, range(0), doing)
        elif isinstance(error, WorkerError):
            _, (rank, type_name, message, samples, doing, terms) = error.__reduce__()
            error = WorkerError(self.ranks[rank], type_name, message, samples, doing, terms)
        if text.traceback:
            error.__cause__ = RemoteTraceback(text.traceback)
        return error
