"""Keeps nodes alive: places and starts them, hears what they answer, replaces those that are lost.

It is to nodes what `Pool` is to the processes of one machine, and only moves messages: who is missing, hung or given up
is decided in `roster`. A node that Ray says is gone, that does not answer, or whose call Ray reports as failed (it may
have been executed) is not heard again; its workers are placed elsewhere as soon as there is room, and take part from
then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

from batchopt.backends.gather import Ignore, Listener
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.patience import ATTEMPTS, Presence, later
from batchopt.backends.ray.actor import NodeActor, request
from batchopt.backends.ray.cluster import Needs, Room, rooms, spread
from batchopt.backends.ray.link import RayLink
from batchopt.backends.ray.messages import CalledOff, NodeReply, NodeRequest, NodeTask, Question
from batchopt.backends.ray.node import ASSIGNMENTS, ClusterNode, NodeMessage, PendingRequest, Released
from batchopt.backends.ray.roster import ANSWERING, GiveUp, NodePlacement, NodeRoster, check, place
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerStartError
from batchopt_workers.versions import versions

# Seconds between two looks at who does not answer, and at where there is room.
INTERVAL = 0.5
# Seconds to wait for room that others leave.
FREEING = 10.0
# Seconds for which room has to be the same before workers are spread over it, as long as others have some of it.
SETTLING = 0.25
# Seconds that nodes have to end their workers.
GRACE = 1.0

# The request that starts a node's workers.
Start = Callable[[ClusterNode], NodeRequest]


# Hears what nodes have done or failed to do, what they gave up of an assignment, and which are gone.
NodeListener: TypeAlias = Listener[ClusterNode, PendingRequest, NodeMessage]


class Nodes:
    """The nodes that have the workers of a roster; `restarts` of these may be replaced.

    A worker that makes no progress for `timeout` seconds counts as hung, and so does a node that gives no sign for as
    long; None for defaults.
    """

    def __init__(self, ray: ModuleType, needs: Needs, start: Start, restarts: int, timeout: float | None) -> None:
        self.by_number: dict[int, ClusterNode] = {}
        self.roster = NodeRoster(restarts)
        self._ray, self._needs, self._start, self._timeout = ray, needs, start, timeout
        self._numbers = 0  # of nodes so far
        self._look_at = 0.0
        self._stopped = False
        self._presence = Presence()

    @property
    def ready(self) -> list[ClusterNode]:
        """The nodes that can work."""
        return [node for node in self.by_number.values() if node.ready]

    # ---- what has to be

    def resize(self, workers: int) -> None:
        """Have so many workers, and wait until they can work; fewer than before are those of the lowest ranks.

        Raises `ValueError` where there is no room, `WorkerStartError` for a node that is not as this one or does
        not answer, `WorkerError` if the user's code raises in a worker that starts.
        """
        before = len(self.roster.infos)
        if workers < before:
            self._shrink(workers)
        try:
            if workers > before:
                self.roster.grow(workers)
                self._place(place(range(before, workers), self._room_for(workers - before)))
                self._await_all()
        except BaseException:
            self._shrink(before)
            raise
        for node in self.by_number.values():
            node.work(PendingRequest(NodeTask.RESIZE), [], request(NodeActor.resize, len(node.ranks), workers))

    def _shrink(self, workers: int) -> None:
        for node in list(self.by_number.values()):
            node.ranks = tuple(rank for rank in node.ranks if rank < workers)
            if not node.ranks:
                del self.by_number[node.number]
                node.kill()
        self.roster.shrink(workers)

    def _await_all(self) -> None:
        patience = max(self._timeout or 0.0, ANSWERING)
        until = time.monotonic() + patience
        while waiting := [node for node in self.by_number.values() if not node.ready]:
            self.pump(Ignore(), until)
            if self.roster.error is not None:
                raise self.roster.error
            if self.roster.failures >= ATTEMPTS:
                raise WorkerStartError(f"workers do not start: {self.roster.ending}")
            if any(node.pending(NodeTask.HANDSHAKE) for node in waiting) and time.monotonic() >= until:
                free = sum(room.workers for room in rooms(self._ray, self._needs))
                raise WorkerStartError(
                    f"no worker was placed within {patience:.0f} s (`timeout`), and Ray has room for {free} more now: "
                    "`ray status` tells who is busy"
                )

    def _room_for(self, workers: int) -> list[Room]:
        """Where so many more workers fit. Room that somebody has just left is free a moment later, on one node sooner
        than on another: so this waits for enough, and until no more comes.

        Raises `ValueError` where they do not fit.
        """
        free: list[Room] | None = None
        since = time.monotonic()
        until = since + FREEING
        while True:
            whole, found, now = (
                rooms(self._ray, self._needs, whole=True),
                rooms(self._ray, self._needs),
                time.monotonic(),
            )
            if found != free:
                free, since = found, now
            left, all_in_all = (sum(room.workers for room in some) for some in (free, whole))
            if workers <= left and (free == whole or now >= min(since + SETTLING, until)):
                return spread(workers, free)
            if workers > all_in_all or now >= until:
                raise ValueError(
                    f"{workers} workers are asked for, each with {self._needs.each}; the cluster has room for {left} "
                    f"more, and for {all_in_all} if nobody else used it: use fewer, or less for each, as "
                    "ray_options={'num_cpus': 0.5}"
                )
            time.sleep(0.02)

    def room(self) -> int:
        """How many more workers the cluster has room for."""
        free = sum(room.workers for room in rooms(self._ray, self._needs))
        return max(0, free - len(self.roster.homeless(self.by_number.values())))

    def _place(self, placements: Iterable[NodePlacement]) -> None:
        """Start actors on nodes; each is asked for a handshake."""
        for place_, ranks in placements:
            link = RayLink(self._ray, place_, len(ranks), self._needs)
            node = ClusterNode(link, self._numbers, place_[:8], ranks)
            self._numbers += 1
            self.by_number[node.number] = node
            node.handshake()

    # ---- what is

    def _replenish(self, now: float) -> None:
        """Place the workers whose node was lost. Raises `AllWorkersLostError` if there is none and will be none."""
        free = rooms(self._ray, self._needs) if self.roster.wants_room(self.by_number.values()) else []
        self._place(self.roster.replace(self.by_number.values(), free))
        self.roster.check_somebody_is_left(self.by_number.values(), now)

    def pump(self, listener: NodeListener, until: float) -> None:
        """Replace what is lost, wait until a node answers (or until that time), and tell `listener`.

        Raises `BatchoptError` once this was stopped.
        """
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + INTERVAL
            self._look_for_hung(now, listener)
            self._replenish(now)
        asked = {ref: (node, pending) for node in self.by_number.values() for ref, pending in node.requests.items()}
        timeout = max(0.0, min(until, self._look_at) - now)
        if not asked:
            time.sleep(timeout)
            self._presence.away(timeout)
            return
        ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=timeout)
        away = self._presence.away(timeout)
        if away:
            for _, pending in asked.values():
                pending.silent = later(pending.silent, away)
            self._look_at = time.monotonic() + INTERVAL  # hear first what was said meanwhile
        for reference in ready:
            node, pending = asked[reference]
            if node.requests.pop(reference, None) is not None:
                self._hear(node, pending, reference, listener)

    def _hear(self, node: ClusterNode, pending: PendingRequest, reference: Any, listener: NodeListener) -> None:
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._lose(node, f"{type(error).__name__}: {' '.join(lines)[:2000]}", listener)
            return
        task = pending.task
        if task is NodeTask.HANDSHAKE:
            self._shook_hands(node, *value)
        elif isinstance(task, NodeTask):
            self._replied(node, pending, task, value, listener)
        elif value is None:
            self._lose(node, f"did not answer for {ANSWERING:.0f} s", listener)
        elif task is Question.RELEASE:
            listener.heard(node, pending, Released([ChunkRun(*run) for run in value]))
        elif task is Question.RESIDUALS:
            listener.heard(node, pending, value)

    def _replied(
        self, node: ClusterNode, pending: PendingRequest, task: NodeTask, reply: NodeReply, listener: NodeListener
    ) -> None:
        self.roster.reported(node, reply.workers)
        failure = reply.failure
        if failure is not None and not failure.is_a(CalledOff):  # which is raised after the updates were taken in
            node.forget_state()
        if task is NodeTask.START:
            node.ready = failure is None
            if failure is None:
                self.roster.started()
            else:
                self.roster.not_started(node.error(failure, task))
                self._lose(node, f"{failure.text.type_name}: {failure.text.message}", listener)
        elif failure is not None and failure.is_a(AllWorkersLostError, WorkerStartError):
            self._lose(node, failure.text.message, listener)
        else:
            listener.heard(node, pending, reply)

    def _shook_hands(self, node: ClusterNode, theirs: str, host: str) -> None:
        node.name = host
        for rank in node.ranks:
            self.roster.infos[rank].host = host
        if theirs != versions():
            error = WorkerStartError(f"{host} has {theirs}; this process has {versions()}: install the same on both")
            self.roster.not_started(error)
            self._lose(node, str(error), Ignore())
        else:
            node.work(PendingRequest(NodeTask.START), [], self._start(node))

    def _look_for_hung(self, now: float, listener: NodeListener) -> None:
        for found in check(list(self.by_number.values()), self._timeout, now):
            if isinstance(found, GiveUp):
                self._lose(found.node, found.why, listener)
            else:
                working = found.node.pending(*ASSIGNMENTS)
                assert working is not None
                found.node.ask(Question.PING, working, found.seconds)

    def _lose(self, node: ClusterNode, why: str, listener: NodeListener) -> None:
        """Hear the node no more: it is gone, or as good as."""
        self.roster.lost(node, why)
        self.by_number.pop(node.number, None)
        node.kill()
        self._look_at = 0.0
        listener.lost(node, self.roster.ending)

    def stop(self) -> None:
        """Let `pump` raise from now on."""
        self._stopped = True

    def close(self) -> None:
        """End the workers, then the nodes' actors."""
        asked = []
        for node in self.ready:
            node.requests.clear()
            node.work(PendingRequest(NodeTask.CLOSE), [], request(NodeActor.close))
            asked += list(node.requests)
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=GRACE)
        kill(self.by_number)
        for info in self.roster.infos:
            info.alive = False


def kill(nodes: dict[int, ClusterNode]) -> None:
    """End all nodes at once."""
    for node in nodes.values():
        node.kill()
    nodes.clear()
