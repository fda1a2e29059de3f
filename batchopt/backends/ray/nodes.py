"""Machines with workers that are kept alive: placed, started, heard, replaced.

What `Pool` is for the processes of one machine. A machine that Ray says is gone, that does not answer, or whose call Ray
reports as failed (it may have been executed) is not heard again; its workers are placed elsewhere as soon as there is
room, and take part from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

from batchopt.backends.gather import Ignore, Listener
from batchopt.backends.ledger import Run
from batchopt.backends.patience import ATTEMPTS, Presence, later
from batchopt.backends.ray.actor import Host, request
from batchopt.backends.ray.cluster import Needs, Room, rooms, spread
from batchopt.backends.ray.link import RayLink
from batchopt.backends.ray.messages import CalledOff, Question, Reply, Request, Task
from batchopt.backends.ray.node import SHARES, Call, Heard, Machine, Released
from batchopt.backends.ray.roster import ANSWERING, GiveUp, NodeRoster, Placement, check, place
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerStartError
from batchopt_workers.versions import versions

# Seconds between two looks at who does not answer, and at where there is room.
INTERVAL = 0.5
# Seconds to wait for room that others leave.
FREEING = 10.0
# Seconds that machines have to end their workers.
GRACE = 1.0

# The request that starts a machine's workers.
Start = Callable[[Machine], Request]


# Hears what nodes have done or failed to do, and what they gave up of a share; and of those that are gone.
NodeListener: TypeAlias = Listener[Machine, Call, Heard]


class Fleet:
    """The machines of so many workers as `infos` has; `restarts` of them may be replaced. A worker that makes no progress for
    `timeout` seconds hangs, and so does a machine that gives no sign for as long; None for defaults."""

    def __init__(self, ray: ModuleType, needs: Needs, start: Start, restarts: int, timeout: float | None) -> None:
        self.machines: dict[int, Machine] = {}
        self.roster = NodeRoster(restarts)
        self._ray, self._needs, self._start, self._timeout = ray, needs, start, timeout
        self._numbers = 0  # of machines so far
        self._look_at = 0.0
        self._stopped = False
        self._presence = Presence()

    @property
    def ready(self) -> list[Machine]:
        """The machines that can work."""
        return [machine for machine in self.machines.values() if machine.ready]

    # ---- what has to be

    def resize(self, workers: int) -> None:
        """Have so many workers, of which those of the lowest ranks are kept, and wait until they can work.

        Raises `ValueError` where there is no room, `WorkerStartError` for a machine that is not as this one or does
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
        for machine in self.machines.values():
            machine.work(Call(Task.RESIZE), [], request(Host.resize, len(machine.ranks), workers))

    def _shrink(self, workers: int) -> None:
        for machine in list(self.machines.values()):
            machine.ranks = tuple(rank for rank in machine.ranks if rank < workers)
            if not machine.ranks:
                del self.machines[machine.number]
                machine.kill()
        self.roster.shrink(workers)

    def _await_all(self) -> None:
        until = time.monotonic() + ANSWERING
        while waiting := [machine for machine in self.machines.values() if not machine.ready]:
            self.pump(Ignore(), until)
            if self.roster.error is not None:
                raise self.roster.error
            if self.roster.failures >= ATTEMPTS:
                raise WorkerStartError(f"workers do not start: {self.roster.ending}")
            if any(machine.at(Task.HANDSHAKE) for machine in waiting) and time.monotonic() >= until:
                raise WorkerStartError(f"no worker was placed within {ANSWERING:.0f} s; `ray status` tells who is busy")

    def _room_for(self, workers: int) -> list[Room]:
        """Where they fit. What somebody has just left is free a moment later: so one waits, if they fit at all."""
        until = time.monotonic() + FREEING
        while True:
            free = rooms(self._ray, self._needs)
            room = sum(place.workers for place in free)
            if workers <= room:
                return spread(workers, free)
            all_in_all = sum(place.workers for place in rooms(self._ray, self._needs, whole=True))
            if workers > all_in_all or time.monotonic() >= until:
                raise ValueError(
                    f"{workers} workers are asked for, each with {self._needs.each}; the cluster has room for {room} more, and for "
                    f"{all_in_all} if nobody else used it: use fewer, or less for each, as ray_options={{'num_cpus': 0.5}}"
                )
            time.sleep(0.1)

    def room(self) -> int:
        """How many workers more the cluster has room for."""
        free = sum(place.workers for place in rooms(self._ray, self._needs))
        return max(0, free - len(self.roster.homeless(self.machines.values())))

    def _place(self, placements: Iterable[Placement]) -> None:
        """Start workers on nodes."""
        for node, ranks in placements:
            machine = Machine(RayLink(self._ray, node, len(ranks), self._needs), self._numbers, node[:8], ranks)
            self._numbers += 1
            self.machines[machine.number] = machine
            machine.greet()

    # ---- what is

    def _replenish(self, now: float) -> None:
        """Place the workers whose machine was lost. Raises `AllWorkersLostError` if there is none and will be none."""
        free = rooms(self._ray, self._needs) if self.roster.wants_room(self.machines.values()) else []
        self._place(self.roster.replace(self.machines.values(), free))
        self.roster.check_somebody_is_left(self.machines.values(), now)

    def pump(self, listener: NodeListener, until: float) -> None:
        """Mend, wait until a machine answers (or until that time), and tell `listener`. Raises `BatchoptError` once this was
        stopped."""
        if self._stopped:
            raise BatchoptError("this BatchOptimizer was closed while it waited for its workers")
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + INTERVAL
            self._look_for_hung(now, listener)
            self._replenish(now)
        calls = {ref: (machine, call) for machine in self.machines.values() for ref, call in machine.calls.items()}
        timeout = max(0.0, min(until, self._look_at) - now)
        if not calls:
            time.sleep(timeout)
            self._presence.away(timeout)
            return
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        away = self._presence.away(timeout)
        if away:
            for _, call in calls.values():
                call.silent = later(call.silent, away)
            self._look_at = time.monotonic() + INTERVAL  # hear first what was said meanwhile
        for reference in ready:
            machine, call = calls[reference]
            if machine.calls.pop(reference, None) is not None:
                self._hear(machine, call, reference, listener)

    def _hear(self, machine: Machine, call: Call, reference: Any, listener: NodeListener) -> None:
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._lose(machine, f"{type(error).__name__}: {' '.join(lines)[:2000]}", listener)
            return
        if call.task is Task.HANDSHAKE:
            self._greeted(machine, *value)
        elif isinstance(call.task, Task):
            self._replied(machine, call, call.task, value, listener)
        elif value is None:
            self._lose(machine, f"did not answer for {ANSWERING:.0f} s", listener)
        elif call.task is Question.RELEASE:
            listener.heard(machine, call, Released([Run(*run) for run in value]))

    def _replied(self, machine: Machine, call: Call, task: Task, reply: Reply, listener: NodeListener) -> None:
        self.roster.reported(machine, reply.workers)
        failed = reply.failed
        if failed is not None and not failed.is_a(CalledOff):  # which comes after the news
            machine.forget()  # what of the news it took in is not known
        if task is Task.START:
            machine.ready = failed is None
            if failed is None:
                self.roster.started()
            else:
                self.roster.not_started(machine.error(failed, task))
                self._lose(machine, f"{failed.text.type_name}: {failed.text.message}", listener)
        elif failed is not None and failed.is_a(AllWorkersLostError, WorkerStartError):
            self._lose(machine, failed.text.message, listener)
        else:
            listener.heard(machine, call, reply)

    def _greeted(self, machine: Machine, theirs: str, host: str) -> None:
        machine.name = host
        for rank in machine.ranks:
            self.roster.infos[rank].host = host
        if theirs != versions():
            error = WorkerStartError(f"{host} has {theirs}; this process has {versions()}: install the same on both")
            self.roster.not_started(error)
            self._lose(machine, str(error), Ignore())
        else:
            machine.work(Call(Task.START), [], self._start(machine))

    def _look_for_hung(self, now: float, listener: NodeListener) -> None:
        for found in check(list(self.machines.values()), self._timeout, now):
            if isinstance(found, GiveUp):
                self._lose(found.machine, found.why, listener)
            else:
                working = found.machine.at(*SHARES)
                assert working is not None
                found.machine.ask(Question.PING, working, found.seconds)

    def _lose(self, machine: Machine, why: str, listener: NodeListener) -> None:
        """The machine is gone, or will not be heard again."""
        self.roster.lost(machine, why)
        self.machines.pop(machine.number, None)
        machine.kill()
        self._look_at = 0.0
        listener.lost(machine, self.roster.ending)

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._stopped = True

    def close(self) -> None:
        """End the workers, then the machines' actors."""
        asked = []
        for machine in self.ready:
            machine.calls.clear()
            machine.work(Call(Task.CLOSE), [], request(Host.close))
            asked += list(machine.calls)
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=GRACE)
        kill(self.machines)
        for info in self.roster.infos:
            info.alive = False


def kill(machines: dict[int, Machine]) -> None:
    """End all at once."""
    for machine in machines.values():
        machine.kill()
    machines.clear()
