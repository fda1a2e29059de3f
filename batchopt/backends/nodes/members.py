"""The group of nodes, generation by generation.

    roster: who should exist ──► gather ──► the team of this generation ──► evaluations
                                   ▲                                            │
                                   └──── a member is lost, or a node joins ◄────┘

What must hold:

- A generation is a group of the living nodes. It ends when a member is lost, or when others are to join: then the
  remaining ones report that they are there, with the number of the last command that they have taken, and form the next
  one. If it is not the last one that a node was sent, what it has is unknown, and it is sent everything again.
- All that nodes learn of generations they read in the store of this process, and they end when it is gone. So whatever
  happens to this process, and at which line, the next call can form the same generation again.
- A loss is decided here alone: by the placer, or since a node gives no sign of life. Whoever waits for it is told by
  the end of the generation.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from batchopt.backends.nodes.group import Group, dist
from batchopt.backends.nodes.node import BEAT, Command, Membership
from batchopt.backends.nodes.placing import Placer
from batchopt.backends.nodes.roster import Member, NodeRoster, NodeState, kill
from batchopt.backends.nodes.team import Team
from batchopt.backends.nodes.wire import Wire
from batchopt.backends.timeouts import ATTEMPTS, STARTUP
from batchopt.errors import AllWorkersLostError, BatchoptError, NodeLostError, WorkerError, WorkerStartError
from batchopt_workers.wire.orders import versions

# Seconds in which a node has to answer at all, and to report once it was placed.
ANSWERING = 30.0


class Members:
    """The nodes of `placer`, of whose workers `restarts` may be replaced. A node that does not respond for `timeout`
    seconds (None: a default; at least three) counts as lost. `wire` is that of this process, which only
    decodes."""

    def __init__(
        self,
        placer: Placer,
        timeout: float | None,
        restarts: int,
        fixed_bits: bool,
        wire: Wire | None,
    ) -> None:
        self.team: Team | None = None
        self._fixed_bits, self._wire, self._address = fixed_bits, wire, placer.address
        self._timeout = max(timeout or ANSWERING, 3 * BEAT)
        self._store: Any = dist.TCPStore(
            placer.address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(0, 60)
        )
        lost = (lambda name: None) if wire is None else wire.lost_with
        self.roster = NodeRoster(placer, self._store.port, restarts, lost)
        self._generation = 0
        self._failures = 0  # consecutive nodes that did not start
        self._stopped = False
        self._end = weakref.finalize(self, kill, self.roster.all)

    def resize(self, workers: int, start: Callable[[Team], None]) -> None:
        """Have `workers` workers, and wait until new ones have started: see `gather`. Raises `ValueError` if there is
        no room, and `WorkerStartError` for a node with other versions or that does not report."""
        before = self.roster.world
        if workers < before:
            self._shrink(workers)
        elif workers > before:
            try:
                self.roster.grow(workers)
                self._await_newcomers()
                self.gather(start, insists=True)
            except BaseException:
                self._shrink(before)
                raise

    def _shrink(self, workers: int) -> None:
        self.roster.shrink(workers)
        self._close()  # the remaining members have other ranks, or other companions

    def _await_newcomers(self) -> None:
        patience = max(self._timeout, 2 * ANSWERING)
        until = time.monotonic() + patience
        while (waiting := self.roster.at(NodeState.PLACED)) and not self._report(waiting):
            self._check_stopped()
            gone = next((why for member in waiting if (why := member.placed.gone()) is not None), None)
            if gone is not None or time.monotonic() > until:
                for member in waiting:
                    self._report([member])  # versions that differ are the better reason
                raise WorkerStartError(
                    f"workers do not start: {gone}"
                    if gone is not None
                    else f"no worker was placed within {patience:.0f} s (`timeout`), and there is room for "
                    f"{self.roster.free()} more now"
                )
            time.sleep(0.005)

    def _report(self, members: Sequence[Member]) -> bool:
        """Tell whether all these nodes have reported. Raises `WorkerStartError` if their versions differ from ours."""
        keys = [f"new/{member.number}" for member in members]
        if not self._store.check(keys):
            return False
        for member, said in zip(members, self._store.multi_get(keys), strict=True):
            theirs, member.name = pickle.loads(said)
            if theirs != versions():
                raise WorkerStartError(
                    f"{member.name} has {theirs}; this process has {versions()}: install the same on both"
                )
            member.on("reports")
        return True

    # ---- generations

    def gather(self, start: Callable[[Team], None], insists: bool = False) -> Team:
        """Return the team of all living nodes: the current one, or a new generation, in which `start` has new nodes
        start their workers. Raises `AllWorkersLostError`, and what starting workers raises: at once, if the caller
        `insists` on them."""
        alone_since, roster = time.monotonic(), self.roster
        while True:
            self._check_stopped()
            roster.replace_lost()
            self._look_at_newcomers()
            newcomers, present = roster.at(NodeState.REPORTED), roster.present
            # The current generation continues as long as no member has left it and no node wants to join; one that was
            # interrupted before all have started does not.
            if self.team is not None and self.team.group.is_open and not newcomers and not roster.at(NodeState.JOINED):
                return self.team
            if not roster.all and roster.restarts <= 0:
                raise self._nobody_left("max_restarts is spent")
            if not newcomers and not present:
                if time.monotonic() - alone_since > STARTUP:
                    raise self._nobody_left(f"there was no room for {STARTUP:.0f} s")
                time.sleep(0.01)
                continue
            try:
                self.team = self._regroup(newcomers)
                if joined := roster.at(NodeState.JOINED):
                    start(self.team)
                for member in joined:
                    member.on("has started")
                self._failures = 0
            except NodeLostError:
                self.end_generation()
            except (WorkerStartError, WorkerError) as error:
                # Others are tried, if any node works.
                self._failures += 1
                for member in roster.at(NodeState.JOINED):
                    roster.lose(member, f"did not start: {error}")
                self._close()
                if insists or self._failures >= ATTEMPTS or not roster.present:
                    raise

    def _nobody_left(self, why: str) -> AllWorkersLostError:
        return AllWorkersLostError(
            f"no worker is left, and {why}: build a new BatchOptimizer. The last one lost: {self.roster.ending}"
        )

    def _look_at_newcomers(self) -> None:
        for member in (*self.roster.at(NodeState.PLACED), *self.roster.at(NodeState.REPORTED)):
            why = member.placed.gone()
            if why is None and member.state is NodeState.PLACED:
                try:
                    if not self._report([member]) and time.monotonic() - member.since > 2 * ANSWERING:
                        why = "was not placed in time"
                except WorkerStartError as error:
                    why = str(error)
            if why is not None:
                self.roster.lose(member, why)

    def _regroup(self, newcomers: list[Member]) -> Team:
        """Form the next generation, of members that are still there and report it, and of these new ones."""
        self._say("regroup")
        self._close()
        generation = self._generation + 1
        self._await(generation)
        # New nodes are first sent the number of the generation, then wait for its members like all others.
        for member in newcomers:
            self._store.set(f"alive/{member.number}", member.beat)  # so that all can be asked for at once
            self._store.set(f"join/{member.number}", str(generation))
            member.beaten = time.monotonic()
            member.on("joins")
        present = self.roster.present
        if not present:
            raise NodeLostError(f"no node is left: {self.roster.ending}", -1)
        ranks = tuple(member.ranks for member in present)
        numbers = tuple(member.number for member in present)
        membership = Membership(numbers, ranks, self._timeout, self._fixed_bits)
        self._generation = generation  # after an interrupt before this line it is formed again
        self._store.set(f"members/{generation}", pickle.dumps(membership))
        name, size = f"group/{generation}", len(present) + 1
        group = Group(self._store, name, 0, size, self._timeout, self._address, self._watch)
        group.names = ["the parent", *(member.name for member in present)]
        return Team(group, [range(0), *ranks], [0], self._fixed_bits, self._wire, self.roster.infos)

    def _await(self, generation: int) -> None:
        """Wait until all present members have reported; those that do not respond are lost, which ends the waits of
        others for them."""
        while coming := self.roster.present:
            self._check_stopped()
            keys = [f"here/{generation}/{member.number}" for member in coming]
            if self._store.check(keys):
                break
            for member, why in self._faults():
                self.roster.lose(member, why)
            time.sleep(0.001)
        for member, taken in zip(coming, self._store.multi_get(keys) if coming else (), strict=True):
            if int(taken) != member.sent:
                member.forget()
            member.sent = int(taken)

    def _faults(self) -> list[tuple[Member, str]]:
        """Return the members that cannot be that any more, and why."""
        present, now = self.roster.present, time.monotonic()
        beats = self._store.multi_get([f"alive/{member.number}" for member in present]) if present else ()
        found = []
        for member, beat in zip(present, beats, strict=True):
            if beat != member.beat:
                member.beat, member.beaten = beat, now
            if (why := member.placed.gone()) is not None:
                found.append((member, why))
            elif now - member.beaten > self._timeout:
                found.append((member, f"did not respond for {self._timeout:.3g} s"))
        return found

    def _watch(self) -> None:
        """Raise `NodeLostError` if a member is gone, or does not respond in time."""
        self._check_stopped()
        present, faults = self.roster.present, self._faults()
        if faults:
            member, why = faults[0]
            self.roster.lose(member, why)
            raise NodeLostError(f"{member.name}: {why}", present.index(member) + 1)

    def forget(self, places: Iterable[int]) -> None:
        """Forget what the members at these places have."""
        for place, member in enumerate(self.roster.present, 1):
            if place in places:
                member.forget()

    def end_generation(self) -> None:
        """End the generation after the loss of a member."""
        self._close()
        self.roster.lose_gone()

    def _say(self, what: str) -> None:
        """Give all members a command without anything else, if they can be reached."""
        if self.team is not None and self.team.group.is_open:
            group = self.team.group
            group.give(dict.fromkeys(group.others, Command(what)))

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
                self._say("end")
            self._close()
        self.team = self._store = None  # with the store, the listening socket is closed
        self._end()
        for info in self.roster.infos:
            info.alive = False
