"""The nodes that should exist, at what each of them is, and where there is room for others.

    placed ──► reported ──► joined ──► working     its workers are started, and it gets orders
      │            │           │          │
      └────────────┴───────────┴──────────┴──► ended; its workers are placed again, as far as there is room

A node reports to the store of the parent that it is there, and with which versions. It joins when the next generation
of the group is formed, and works once it has answered that its workers are started: until then it is told to start them
in each generation. Workers whose node was lost have no home; each that is placed again takes one of the restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter

from batchopt.backends.nodes.placing import Capacity, NodeProcess, Placer, free_ranks, placements, spread
from batchopt.backends.nodes.result import Infos
from batchopt.backends.nodes.wanted import NodeWanted, World

# Seconds between two searches for room for lost workers.
INTERVAL = 0.5
# Seconds to wait for room that others release, and for which it has to stay the same before workers are distributed.
FREEING, SETTLING = 10.0, 0.25


class NodeState(Enum):
    """The states of a node."""

    PLACED = "its process was asked for"
    REPORTED = "it is there, and waits for a generation"
    JOINED = "it is in the group; whether its workers are started is not known"
    WORKING = "its workers are started"
    ENDED = "it was lost, or is not needed any more"


# By its state and what happens to a node: the state that follows. Nothing else can happen to it.
TRANSITIONS = {
    (NodeState.PLACED, "reports"): NodeState.REPORTED,
    (NodeState.REPORTED, "joins"): NodeState.JOINED,
    (NodeState.JOINED, "has started"): NodeState.WORKING,
    (NodeState.PLACED, "ends"): NodeState.ENDED,
    (NodeState.REPORTED, "ends"): NodeState.ENDED,
    (NodeState.JOINED, "ends"): NodeState.ENDED,
    (NodeState.WORKING, "ends"): NodeState.ENDED,
}
# It belongs to the group.
IN_GROUP = frozenset({NodeState.JOINED, NodeState.WORKING})


class Member:
    """A node as the parent sees it: the ranks of its workers, and what it has."""

    def __init__(self, number: int, placed: NodeProcess, ranks: range) -> None:
        self.number, self.placed, self.ranks = number, placed, ranks
        self.name, self.state = f"node {number}", NodeState.PLACED
        self.sent = 0  # the number of the last command that it was sent
        self.have = NodeWanted()
        self.x: object = None  # X as it was sent last
        self.since = time.monotonic()
        self.beat, self.beaten = b"", time.monotonic()  # its last sign of life, and its time

    def on(self, event: str) -> None:
        """Note what has happened to it."""
        self.state = TRANSITIONS[self.state, event]

    def world(self, workers: int) -> World:
        """Return its ranks, among those of `workers` workers; what it has already, if that is the same."""
        world = World(self.ranks, workers)
        return self.have.world if self.have.world == world else world

    def forget(self) -> None:
        """Forget what it has, which is unknown: it is sent everything again, except to start workers that work."""
        self.have = NodeWanted(setup=self.have.setup if self.state is NodeState.WORKING else None)
        self.x = None


class NodeRoster:
    """The nodes of `placer`, which report at `port`, and their workers, of whom `restarts` may be replaced."""

    def __init__(self, placer: Placer, port: int, restarts: int, lost: Callable[[str], None]) -> None:
        self.all: list[Member] = []
        self.infos = Infos()
        self.world = 0  # the number of workers that should exist
        self.ending = ""  # the cause for the node that was lost last
        self.restarts = restarts
        self._placer, self._port, self._lost = placer, port, lost
        self._numbers = 0
        self._look_at = 0.0  # the time of the next search for room

    @property
    def present(self) -> list[Member]:
        """The members of the current group, in the order of their places, which is that of their ranks."""
        return sorted((m for m in self.all if m.state in IN_GROUP), key=attrgetter("ranks.start"))

    def at(self, state: NodeState) -> list[Member]:
        """Return the nodes in that state."""
        return [member for member in self.all if member.state is state]

    # ---- placing

    def grow(self, workers: int) -> None:
        """Place more workers. Raises `ValueError` if there is no room."""
        at, more = self.world, workers - self.world
        self.world = workers
        self.infos.expect(workers)
        for machine, count in spread(more, self._room_for(more)):
            self._place(machine, range(at, at + count))
            at += count

    def shrink(self, workers: int) -> None:
        """Keep only the workers of the lowest ranks."""
        self.world = workers
        self.infos.expect(workers)
        for member in list(self.all):
            member.ranks = range(member.ranks.start, max(member.ranks.start, min(member.ranks.stop, workers)))
            if not member.ranks:
                self._end(member)

    def _place(self, machine: str, ranks: range) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        placed = self._placer.place(machine, len(ranks), self._placer.address, self._port, number)
        self.all.append(Member(number, placed, ranks))

    def _room_for(self, workers: int) -> list[Capacity]:
        """Find room for more workers. Released room becomes free after a moment, on one node sooner than on another: so
        wait until there is enough and it no longer grows."""
        free: list[Capacity] | None = None
        since = time.monotonic()
        until = since + FREEING
        while True:
            whole, found, now = self._placer.rooms(whole=True), self._placer.rooms(), time.monotonic()
            if found != free:
                free, since = found, now
            left, all_in_all = count(free), count(whole)
            if workers <= left and (free == whole or now >= min(since + SETTLING, until)):
                return free
            if workers > all_in_all or now >= until:
                raise ValueError(self._placer.refusal(workers, left, all_in_all))
            time.sleep(0.02)

    def free(self) -> int:
        """Return how many workers would fit now."""
        return count(self._placer.rooms())

    def room(self) -> int:
        """Return how many workers would fit beside those that are to be placed again."""
        return max(0, self.free() - sum(map(len, self.homeless())))

    def homeless(self) -> list[range]:
        """Return the runs of ranks whose workers have no node."""
        return free_ranks([member.ranks for member in self.all], self.world)

    def replace_lost(self) -> None:
        """Place the workers whose node was lost, as far as there is room and restarts are left. The others count as
        lost until there is room."""
        homeless = self.homeless()
        if homeless and self.restarts > 0 and time.monotonic() >= self._look_at:
            # Asking a cluster for its room takes milliseconds: not in each evaluation.
            self._look_at = time.monotonic() + INTERVAL
            for machine, ranks in placements(homeless, self._placer.rooms(), self.restarts):
                self.restarts -= len(ranks)
                self.infos.moved(ranks)
                self._place(machine, ranks)
            homeless = self.homeless()
        for ranks in homeless:
            for info in self.infos.of(ranks):
                info.lost, info.alive = True, False

    # ---- losses

    def lose(self, member: Member, why: str) -> None:
        """Give up a node, unless that was done before."""
        if member not in self.all:
            return
        self._end(member)
        first, last = member.ranks.start, member.ranks.stop - 1
        workers = f"worker {first}" if first == last else f"workers {first} to {last}"
        self.ending = f"{member.name} ({workers}) {why}"
        for info in self.infos.of(member.ranks):
            info.alive = False
        self._lost(member.name)

    def lose_gone(self) -> None:
        """Give up the members of the group whose process has ended."""
        for member in self.present:
            if (why := member.placed.gone()) is not None:
                self.lose(member, why)

    def _end(self, member: Member) -> None:
        self.all.remove(member)
        member.on("ends")
        member.placed.kill()


def count(rooms: Sequence[Capacity]) -> int:
    """Return how many workers fit."""
    return sum(room.workers for room in rooms)


def kill(members: list[Member]) -> None:
    """End all nodes."""
    for member in members:
        member.placed.kill()
    members.clear()
