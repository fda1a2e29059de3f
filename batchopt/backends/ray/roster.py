"""Which workers should be on nodes, and which node is asked for a sign or given up: decisions without input or output.

The nodes tell the roster what has happened and ask it what to do. Which nodes there are, and with which ranks, is
handed over with each question, so that an interrupt between two statements leaves nothing to repair.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from batchopt.backends.base import WorkerInfo
from batchopt.backends.patience import STARTUP, UNKNOWN
from batchopt.backends.ray.cluster import Room, spread
from batchopt.backends.ray.messages import NodeTask, Question, WorkerStatus
from batchopt.backends.ray.node import ASSIGNMENTS, ClusterNode
from batchopt.errors import AllWorkersLostError

# Seconds in which a node has to answer at all: when it is placed, and when it is asked whether it still works.
ANSWERING = 30.0


class NodePlacement(NamedTuple):
    """Workers of these ranks are to be started on that node."""

    node: str
    ranks: tuple[int, ...]


def place(ranks: Sequence[int], rooms: Iterable[Room]) -> list[NodePlacement]:
    """Put the ranks, in order, where there is room for them."""
    found, at = [], 0
    for room in rooms:
        found.append(NodePlacement(room.node, tuple(ranks[at : at + room.workers])))
        at += room.workers
    return found


class NodeRoster:
    """The workers that there should be, and how many of them may still be replaced."""

    def __init__(self, restarts: int) -> None:
        self.infos: list[WorkerInfo] = []
        self.ending = ""  # of the node that was lost last
        self.failures = 0  # of nodes to start, in a row
        self.error: BaseException | None = None  # of the first node that did not start
        self._restarts = restarts
        self._alone_since = math.inf

    # ---- what has happened

    def grow(self, workers: int) -> None:
        """There should be more workers."""
        self.failures, self.error = 0, None
        for rank in range(len(self.infos), workers):
            self.infos.append(WorkerInfo(rank, 0, "", torch.device("cpu"), alive=False))

    def shrink(self, workers: int) -> None:
        """There should be fewer."""
        for info in self.infos[workers:]:
            info.alive = False
        del self.infos[workers:]

    def reported(self, node: ClusterNode, statuses: Iterable[WorkerStatus]) -> None:
        """The node has said how its workers are."""
        for rank, status in zip(node.ranks, statuses, strict=False):
            info = self.infos[rank]
            info.pid, info.device = status.pid, torch.device(status.device)
            info.alive, info.lost = status.alive, status.lost
            info.restarts += status.restarts - node.restarts.get(rank, 0)
            node.restarts[rank] = status.restarts

    def started(self) -> None:
        """A node has started its workers."""
        self.failures = 0

    def not_started(self, error: BaseException) -> None:
        """A node cannot start its workers."""
        self.error = self.error or error

    def lost(self, node: ClusterNode, why: str) -> None:
        """The node is gone, or will not be heard again."""
        first, last = node.ranks[0], node.ranks[-1]
        workers = f"worker {first}" if first == last else f"workers {first} to {last}"
        self.ending = f"{node.name} ({workers}) {why}"
        self.failures += 0 if node.ready else 1
        for rank in node.ranks:
            self.infos[rank].alive = False

    # ---- what to do

    def homeless(self, nodes: Iterable[ClusterNode]) -> list[int]:
        """The ranks that are on none of the nodes."""
        placed = {rank for node in nodes for rank in node.ranks}
        return [info.rank for info in self.infos if info.rank not in placed]

    def wants_room(self, nodes: Iterable[ClusterNode]) -> bool:
        """Whether there are workers to be placed, and it is allowed."""
        return self._restarts > 0 and bool(self.homeless(nodes))

    def replace(self, nodes: Collection[ClusterNode], free: Sequence[Room]) -> list[NodePlacement]:
        """Where to start the workers whose node was lost, as far as there is room and it is allowed; each start costs a
        restart. The others count as lost until there is room."""
        homeless = self.homeless(nodes)
        fit = min(len(homeless), sum(room.workers for room in free), self._restarts)
        self._restarts -= fit
        for rank in homeless[:fit]:
            self.infos[rank].restarts += 1
            self.infos[rank].lost = False
        for rank in homeless[fit:]:
            self.infos[rank].lost = True
        return place(homeless[:fit], spread(fit, free))

    def check_somebody_is_left(self, nodes: Collection[ClusterNode], now: float) -> None:
        """Raise `AllWorkersLostError` if there is no node and will be none."""
        if nodes or not self.infos:
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, now)
        if self._restarts <= 0 or now - self._alone_since > STARTUP:
            why = "max_restarts is spent" if self._restarts <= 0 else f"there was no room for {STARTUP:.0f} s"
            raise AllWorkersLostError(
                f"no worker is left, and {why}: build a new BatchOptimizer. The last one lost: {self.ending}"
            )


class GiveUp(NamedTuple):
    """The node is not to be heard again."""

    node: ClusterNode
    why: str


class Ping(NamedTuple):
    """The node is to be asked for a sign within so many seconds, while it works on this."""

    node: ClusterNode
    seconds: float


def check(nodes: Iterable[ClusterNode], timeout: float | None, now: float) -> list[GiveUp | Ping]:
    """Look at what each node was asked and has not answered. A node that works gives no sign by itself: so it is asked
    for one. `timeout` is the user's, None for defaults."""
    found: list[GiveUp | Ping] = []
    patience = timeout or ANSWERING
    for node in nodes:
        working, pinged = node.pending(*ASSIGNMENTS), node.pending(Question.PING, Question.RESIDUALS)
        starting, greeting = node.pending(NodeTask.START), node.pending(NodeTask.HANDSHAKE)
        if pinged is not None and now - pinged.silent > patience:
            found.append(GiveUp(node, f"gave no sign for {patience:.3g} s"))
        elif working is not None and pinged is None and now - working.silent > patience:
            found.append(Ping(node, patience))
        elif starting is not None and now - starting.silent > max(timeout or UNKNOWN, STARTUP):
            found.append(GiveUp(node, "did not start in time"))
        elif greeting is not None and now - greeting.silent > 2 * ANSWERING:
            found.append(GiveUp(node, "was not placed in time"))
        elif not node.ready and starting is None and greeting is None:
            found.append(GiveUp(node, "was forgotten when an interrupt came"))
    return found
