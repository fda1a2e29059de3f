"""The nodes of a backend: placed, joined, lost and replaced, generation by generation.

A generation is a group of the living nodes. It ends when a member is lost, or when others are to join: then the
remaining ones report that they are there, and form the next one. The state of a node is known as long as it reports
that it has taken over everything that was sent.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from batchopt.backends.nodes.contribution import GradientResiduals, Infos
from batchopt.backends.nodes.group import Group, dist
from batchopt.backends.nodes.node import BEAT, Membership, NodeCommand
from batchopt.backends.nodes.placing import Placed, Placer, Room, free_ranks, placements, spread
from batchopt.backends.nodes.team import Team
from batchopt.backends.patience import ATTEMPTS, STARTUP
from batchopt.errors import AllWorkersLostError, BatchoptError, NodeLostError, WorkerError, WorkerStartError
from batchopt_workers.process.messages import versions

# Seconds in which a node has to answer at all, and to report once it was placed.
ANSWERING = 30.0
# Seconds between two searches for room for lost workers.
INTERVAL = 0.5
# Seconds to wait for room that others release, and for which it has to stay the same before workers are distributed.
FREEING, SETTLING = 10.0, 0.25


class Member:
    """A node as the parent sees it: the ranks of its workers, and what it was sent, by name."""

    def __init__(self, number: int, placed: Placed, ranks: range) -> None:
        self.number, self.placed, self.ranks = number, placed, ranks
        self.name = f"node {number}"
        self.is_in = False  # whether it belongs to the group
        self.sent = 0  # commands
        self.has: dict[str, Any] = {}
        self.since = time.monotonic()
        self.beat, self.beaten = b"", time.monotonic()  # its last sign of life, and its time

    def forget(self) -> None:
        """Forget the node's state, which is unknown: it is sent everything again, except its workers."""
        self.has = {name: value for name, value in self.has.items() if name == "started"}


class Members:
    """The nodes of `placer`, of whose workers `restarts` may be replaced. A node that does not respond for `timeout`
    seconds (None: a default; at least three) counts as lost."""

    def __init__(self, placer: Placer, timeout: float | None, restarts: int, world: int, fixed_bits: bool) -> None:
        self.all: list[Member] = []
        self.infos = Infos()
        self.world = world  # the number of workers that should exist
        self.ending = ""  # the cause for the node that was lost last
        self.team: Team | None = None
        self.residuals: GradientResiduals | None = None  # of this process, which only decodes
        self.lost: Callable[[Member], None] = lambda member: None
        self._placer, self._restarts, self._fixed_bits = placer, restarts, fixed_bits
        self._timeout = max(timeout or ANSWERING, 3 * BEAT)
        self._store: Any = dist.TCPStore(
            placer.address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(0, 60)
        )
        self._numbers = self._generation = 0
        self._failures = 0  # consecutive nodes that did not start
        self._look_at = 0.0  # the time of the next search for room
        self._stopped = False
        self._end = weakref.finalize(self, _kill, self.all)

    @property
    def present(self) -> list[Member]:
        """The members of the current group, in the order of their places, which is that of their ranks."""
        return sorted((member for member in self.all if member.is_in), key=lambda member: member.ranks.start)

    # ---- placing

    def grow(self, workers: int) -> None:
        """Add workers, and wait until their nodes have reported. Raises `ValueError` if there is no room, and
        `WorkerStartError` for a node with other versions or that does not report."""
        before, self.world = self.world, workers
        self.infos.expect(range(before, workers))
        try:
            rooms = spread(workers - before, self._room_for(workers - before))
            at = before
            for machine, count in rooms:
                self._place(machine, range(at, at + count))
                at += count
            self._await_newcomers()
        except BaseException:
            self.shrink(before)
            raise

    def shrink(self, workers: int) -> None:
        """Keep only the workers of the lowest ranks."""
        self.world = workers
        self.infos.cut(workers)
        for member in self.all:
            member.ranks = range(member.ranks.start, max(member.ranks.start, min(member.ranks.stop, workers)))
        for member in [member for member in self.all if not member.ranks]:
            self.all.remove(member)
            member.placed.kill()
        self._close()  # the remaining members have other ranks, or other companions

    def _place(self, machine: str, ranks: range) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        placed = self._placer.place(machine, len(ranks), self._placer.address, self._store.port, number)
        self.all.append(Member(number, placed, ranks))

    def _room_for(self, workers: int) -> list[Room]:
        """Find room for more workers. Released room becomes free after a moment, on one node sooner than on another: so
        wait until there is enough and it no longer grows."""
        free: list[Room] | None = None
        since = time.monotonic()
        until = since + FREEING
        while True:
            whole, found, now = self._placer.rooms(whole=True), self._placer.rooms(), time.monotonic()
            if found != free:
                free, since = found, now
            left, all_in_all = (sum(room.workers for room in some) for some in (free, whole))
            if workers <= left and (free == whole or now >= min(since + SETTLING, until)):
                return free
            if workers > all_in_all or now >= until:
                raise ValueError(self._placer.refusal(workers, left, all_in_all))
            time.sleep(0.02)

    def room(self) -> int:
        """Return how many more workers would fit."""
        free = sum(room.workers for room in self._placer.rooms())
        return max(0, free - sum(map(len, self._homeless())))

    def _homeless(self) -> list[range]:
        return free_ranks([member.ranks for member in self.all], self.world)

    def _await_newcomers(self) -> None:
        until = time.monotonic() + max(self._timeout, 2 * ANSWERING)
        while waiting := [member for member in self.all if not member.is_in and not self._has_come(member)]:
            self._check_stopped()
            if time.monotonic() > until:
                free = sum(room.workers for room in self._placer.rooms())
                raise WorkerStartError(
                    f"no worker was placed within {max(self._timeout, 2 * ANSWERING):.0f} s (`timeout`), and there is "
                    f"room for {free} more now"
                )
            gone = next((why for member in waiting if (why := member.placed.gone())), None)
            if gone is not None:
                raise WorkerStartError(f"workers do not start: {gone}")
            time.sleep(0.005)

    def _has_come(self, member: Member) -> bool:
        """Tell whether the node has reported. Raises `WorkerStartError` if its versions differ from ours."""
        key = f"new/{member.number}"
        if not self._store.check([key]):
            return False
        theirs, member.name = pickle.loads(self._store.get(key))
        if theirs != versions():
            raise WorkerStartError(
                f"{member.name} has {theirs}; this process has {versions()}: install the same on both"
            )
        return True

    # ---- generations

    def gather(self, start: Callable[[Team], None], insists: bool = False) -> Team:
        """Return the team of all living nodes: the current one, or a new generation, in which `start` has new nodes
        start their workers. Raises `AllWorkersLostError`, and what starting workers raises: at once, if the caller
        `insists` on them."""
        alone_since = time.monotonic()
        while True:
            self._check_stopped()
            self._replace()
            newcomers = [member for member in self.all if not member.is_in and self._came(member)]
            # The current generation continues as long as no member has left it and no node wants to join.
            if self.team is not None and self.team.group.is_open and not newcomers:
                return self.team
            if not self.all and self._restarts <= 0:
                raise self._nobody_left("max_restarts is spent")
            if not newcomers and not self.present:
                if time.monotonic() - alone_since > STARTUP:
                    raise self._nobody_left(f"there was no room for {STARTUP:.0f} s")
                time.sleep(0.01)
                continue
            try:
                self.team = self._regroup(newcomers)
                start(self.team)
                self._failures = 0
            except NodeLostError:
                self.forgo()
            except (WorkerStartError, WorkerError) as error:
                self._not_started(newcomers, error, insists)

    def _nobody_left(self, why: str) -> AllWorkersLostError:
        return AllWorkersLostError(
            f"no worker is left, and {why}: build a new BatchOptimizer. The last one lost: {self.ending}"
        )

    def _not_started(self, newcomers: list[Member], error: BaseException, insists: bool) -> None:
        """Handle nodes whose workers do not start: others are tried, if any node works."""
        self._failures += 1
        for member in newcomers:
            self._lose(member, f"did not start: {error}")
        self._close()
        if insists or self._failures >= ATTEMPTS or not self.present:
            raise error

    def _replace(self) -> None:
        """Place the workers whose node was lost, as far as there is room; each start takes a restart. The others count
        as lost until there is room."""
        homeless = self._homeless()
        if homeless and self._restarts > 0 and time.monotonic() >= self._look_at:
            # Asking a cluster for its room takes milliseconds: not in each evaluation.
            self._look_at = time.monotonic() + INTERVAL
            for machine, ranks in placements(homeless, self._placer.rooms(), self._restarts):
                self._restarts -= len(ranks)
                self.infos.moved(ranks)
                for info in self.infos.of(ranks):
                    info.restarts += 1
                    info.lost = False
                self._place(machine, ranks)
        for ranks in self._homeless():
            for info in self.infos.of(ranks):
                info.lost, info.alive = True, False

    def _came(self, member: Member) -> bool:
        if (why := member.placed.gone()) is not None:
            self._lose(member, why)
            return False
        if time.monotonic() - member.since > 2 * ANSWERING:
            self._lose(member, "was not placed in time")
            return False
        try:
            return self._has_come(member)
        except WorkerStartError as error:
            self._lose(member, str(error))
            return False

    def _regroup(self, newcomers: list[Member]) -> Team:
        """Form the next generation, of members that are still there and report it, and of these new ones."""
        if self.team is not None and self.team.group.is_open:
            self.team.group.give(dict.fromkeys(self.team.group.others, NodeCommand("regroup")))
        self._close()
        generation = self._generation + 1
        self._await(generation)
        # New nodes are first sent the number of the generation, then wait for its members like all others.
        for member in newcomers:
            self._store.set(f"join/{member.number}", str(generation))
            member.is_in, member.beaten = True, time.monotonic()
        present = self.present
        if not present:
            raise NodeLostError(f"no node is left: {self.ending}", -1)
        ranks = tuple(member.ranks for member in present)
        membership = Membership(tuple(member.number for member in present), ranks, self._timeout)
        self._generation = generation  # after an interrupt before this line it is formed again
        self._store.set(f"members/{generation}", pickle.dumps(membership))
        name, size = f"group/{generation}", len(present) + 1
        group = Group(self._store, name, 0, size, self._timeout, self._placer.address, self._watch)
        group.names = ["the parent", *(member.name for member in present)]
        team = Team(group, None, [range(0), *ranks], [0], self._fixed_bits, self.residuals)
        team.infos = self.infos
        return team

    def _await(self, generation: int) -> None:
        """Wait until all present members have reported; those that do not respond are lost, which ends the waits of
        others for them."""
        coming = self.present
        while coming:
            self._check_stopped()
            for member in list(coming):
                key = f"here/{generation}/{member.number}"
                if self._store.check([key]):
                    coming.remove(member)
                    taken = int(self._store.get(key))
                    # Commands were lost on the way: the member's state is unknown.
                    if taken != member.sent:
                        member.forget()
                    member.sent = taken
                elif (why := self._fault_of(member)) is not None:
                    coming.remove(member)
                    self._lose(member, why)
            time.sleep(0.001 if coming else 0.0)

    def _fault_of(self, member: Member) -> str | None:
        """Return the reason why it cannot be a member any more."""
        if (why := member.placed.gone()) is not None:
            return why
        return f"did not respond for {self._timeout:.3g} s" if self._is_silent(member) else None

    # ---- losses

    def _watch(self) -> None:
        """Raise `NodeLostError` if a member is gone, or does not respond in time."""
        self._check_stopped()
        for place, member in enumerate(self.present, 1):
            if (why := self._fault_of(member)) is not None:
                self._lose(member, why)
                raise NodeLostError(f"{member.name}: {why}", place)

    def _is_silent(self, member: Member) -> bool:
        key, now = f"alive/{member.number}", time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != member.beat:
            member.beat, member.beaten = beat, now
        return now - member.beaten > self._timeout

    def forgo(self) -> None:
        """End the generation after the loss of a member."""
        self._close()
        for member in list(self.present):
            if (why := member.placed.gone()) is not None:
                self._lose(member, why)

    def _lose(self, member: Member, why: str) -> None:
        if member not in self.all:
            return
        self.all.remove(member)
        member.placed.kill()
        first, last = member.ranks.start, member.ranks.stop - 1
        workers = f"worker {first}" if first == last else f"workers {first} to {last}"
        self.ending = f"{member.name} ({workers}) {why}"
        for info in self.infos.of(member.ranks):
            info.alive = False
        self.lost(member)

    def _close(self) -> None:
        """End the generation. Members check the store for that: otherwise one that waits for an unreachable member
        would wait for ever."""
        if self.team is not None:
            self._store.set(f"over/{self._generation}", "")
            self.team.group.close()

    def _check_stopped(self) -> None:
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")

    def stop(self) -> None:
        """Make every wait raise `BatchoptError`."""
        self._stopped = True
        if self.team is not None:
            self.team.group.stop()

    def close(self) -> None:
        """End all nodes; those that can be reached end their workers themselves."""
        if self.team is not None and self.team.group.is_open:
            with suppress(BatchoptError):
                self.team.group.give(dict.fromkeys(self.team.group.others, NodeCommand("end")))
            self._close()
        self.team = self._store = None  # with the store, the listening socket is closed
        self._end()
        for info in self.infos:
            info.alive = False


def _kill(members: list[Member]) -> None:
    for member in members:
        member.placed.kill()
    members.clear()
