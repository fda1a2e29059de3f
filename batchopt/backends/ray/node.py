"""A node of the cluster as the parent sees it: its workers' ranks, what it was sent, and what it was asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.actor import NodeActor
from batchopt.backends.ray.link import Link
from batchopt.backends.ray.messages import (
    Envelope,
    NodeFailure,
    NodeReply,
    NodeRequest,
    NodeTask,
    Question,
    ResidualName,
    ResidualsMessage,
)
from batchopt.backends.ray.node_state import NodeState
from batchopt.errors import RemoteTraceback, WorkerError

# The tasks that evaluate chunks.
ASSIGNMENTS = (NodeTask.EVALUATE, NodeTask.PROBE)


class Released(NamedTuple):
    """A node that was asked for some of its assignment gave up these chunks."""

    runs: list[ChunkRun]


# What a node can answer.
NodeMessage = NodeReply | Released | ResidualsMessage


@dataclass
class PendingRequest:
    """Something that a node was asked: for which evaluation and assignment, when, and since when it has been silent."""

    task: NodeTask | Question
    evaluation: int = -1
    attempt: int = -1
    since: float = field(default_factory=time.monotonic)
    silent: float = field(default_factory=time.monotonic)


class ClusterNode:
    """The workers of some `ranks` on one machine, behind an actor. `number` tells it from all other nodes, earlier ones
    too."""

    def __init__(self, link: Link, number: int, name: str, ranks: tuple[int, ...]) -> None:
        self.number, self.name, self.ranks = number, name, ranks
        self.ready = False  # whether its workers have started
        self.state = NodeState()
        self.restarts: dict[int, int] = {}  # of its workers there, by rank
        self.requests: dict[Any, PendingRequest] = {}  # not answered yet; by the reference of the answer
        self._link = link
        # Requests build on each other. When one has failed, those that follow begin a new epoch.
        self._epoch = self._position = 0

    def handshake(self) -> None:
        """Ask for its versions and name."""
        self._note(self._link.call(NodeActor.handshake), PendingRequest(NodeTask.HANDSHAKE))

    def work(self, pending: PendingRequest, updates: Sequence[NodeRequest], task: NodeRequest) -> None:
        """Ask it to take in `updates` and do `task`."""
        envelope = Envelope(self._epoch, self._position, updates, task.method)
        self._position += 1
        self._note(self._link.call(NodeActor.work, envelope, *task.arguments), pending)

    def ask(self, question: Question, about: PendingRequest, seconds: float) -> None:
        """Ask it about an assignment while it works on that; it answers within so many seconds."""
        answer = self._link.call_aside(NodeActor.ask, question, about.attempt, seconds)
        self._note(answer, PendingRequest(question, about.evaluation, about.attempt))

    def ask_for_residuals(self, names: Sequence[ResidualName]) -> None:
        """Ask it for what compression has left there, whatever it is working on."""
        self._note(self._link.call_aside(NodeActor.residuals, names), PendingRequest(Question.RESIDUALS))

    def _note(self, reference: Any, pending: PendingRequest) -> None:
        self.requests[reference] = pending

    def forget_state(self) -> None:
        """It has failed, and nobody knows which updates it took in: so it will be sent everything again."""
        self.state = self.state.forgotten()
        self._epoch, self._position = self._epoch + 1, 0

    def pending(self, *tasks: NodeTask | Question) -> PendingRequest | None:
        """The first request of these kinds that it has not answered."""
        return next((request for request in self.requests.values() if request.task in tasks), None)

    def assignment(self, evaluation: int) -> PendingRequest | None:
        """What it has been given of this evaluation and not answered."""
        pending = (request for request in self.requests.values() if request.task in ASSIGNMENTS)
        return next((request for request in pending if request.evaluation == evaluation), None)

    def kill(self) -> None:
        """End the actor and its workers; nothing that it says is heard any more."""
        self.requests.clear()
        self._link.end()

    def error(self, failure: NodeFailure, task: NodeTask) -> BaseException:
        """The exception that was raised there, to be raised here."""
        error, text = failure.error, failure.text
        if error is None:
            doing = f"{task.value} on {self.name}"
            error = WorkerError(self.ranks[0], text.type_name, text.message, range(0), doing)
        elif isinstance(error, WorkerError):  # which has the rank on that node
            _, (rank, *others) = error.__reduce__()
            error = WorkerError(self.ranks[rank], *others)
        if text.traceback:
            error.__cause__ = RemoteTraceback(text.traceback)
        return error
