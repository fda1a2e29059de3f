"""Machines with workers that are kept alive: placed, started, heard, replaced.

What `Pool` is for the processes of one machine. A machine that Ray says is gone, that does not answer, or whose call Ray
reports as failed (it may have been executed) is not heard again; its workers are placed elsewhere as soon as there is
room, and take part from then on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch

from batchopt.backends.base import WorkerInfo
from batchopt.backends.gather import Ignore, Listener
from batchopt.backends.ledger import Run
from batchopt.backends.patience import ATTEMPTS, STARTUP, UNKNOWN, Presence, later
from batchopt.backends.ray.actor import Host, request
from batchopt.backends.ray.cluster import Needs, Room, rooms, spread
from batchopt.backends.ray.link import RayLink
from batchopt.backends.ray.messages import CalledOff, Condition, Question, Reply, Request, Task
from batchopt.backends.ray.node import SHARES, Call, Heard, Machine, Released
from batchopt.errors import AllWorkersLostError, BatchoptError, WorkerStartError
from batchopt_workers.versions import versions

# Seconds in which a machine has to answer at all: when it is placed, and when it is asked whether it still works.
ANSWERING = 30.0
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
        self.infos: list[WorkerInfo] = []
        self.ending = ""  # of the machine that was lost last
        self._ray, self._needs, self._start, self._restarts, self._timeout = ray, needs, start, restarts, timeout
        self._numbers = 0  # of machines so far
        self._look_at = 0.0
        self._stopped = False
        self._presence = Presence()
        self._alone_since = math.inf
        self._error: BaseException | None = None  # of a machine that did not start
        self._failures = 0  # of machines to start, in a row

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
        before = len(self.infos)
        if workers < before:
            self._shrink(workers)
        self.infos += [WorkerInfo(rank, 0, "", torch.device("cpu"), alive=False) for rank in range(before, workers)]
        try:
            if workers > before:
                self._error, self._failures = None, 0
                self._place(range(before, workers), self._room_for(workers - before))
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
        for info in self.infos[workers:]:
            info.alive = False
        del self.infos[workers:]

    def _await_all(self) -> None:
        until = time.monotonic() + ANSWERING
        while waiting := [machine for machine in self.machines.values() if not machine.ready]:
            self.pump(Ignore(), until)
            if self._error is not None:
                raise self._error
            if self._failures >= ATTEMPTS:
                raise WorkerStartError(f"workers do not start: {self.ending}")
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
        return max(0, sum(place.workers for place in rooms(self._ray, self._needs)) - len(self._homeless))

    def _place(self, ranks: Sequence[int], places: Sequence[Room]) -> None:
        """Start the workers of these ranks there."""
        at = 0
        for place in places:
            link = RayLink(self._ray, place.node, place.workers, self._needs)
            machine = Machine(link, self._numbers, place.node[:8], tuple(ranks[at : at + place.workers]))
            at += place.workers
            self._numbers += 1
            self.machines[machine.number] = machine
            machine.greet()

    # ---- what is

    @property
    def _homeless(self) -> list[int]:
        """The ranks of workers that are on no machine."""
        placed = {rank for machine in self.machines.values() for rank in machine.ranks}
        return [info.rank for info in self.infos if info.rank not in placed]

    def _replenish(self, now: float) -> None:
        """Place the workers whose machine was lost, as far as there is room and it is allowed.

        Raises `AllWorkersLostError` if there is no worker and will be none.
        """
        homeless = self._homeless
        if homeless and self._restarts > 0:
            free = rooms(self._ray, self._needs)
            fit = min(len(homeless), sum(place.workers for place in free), self._restarts)
            self._place(homeless[:fit], spread(fit, free))
            self._restarts -= fit
            for rank in homeless[:fit]:
                self.infos[rank].restarts += 1
                self.infos[rank].lost = False
        for rank in self._homeless:
            self.infos[rank].lost = True
        if self.machines or not self.infos:
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, now)
        if self._restarts <= 0 or now - self._alone_since > STARTUP:
            why = "max_restarts is spent" if self._restarts <= 0 else f"there was no room for {STARTUP:.0f} s"
            raise AllWorkersLostError(
                f"no worker is left, and {why}: build a new BatchOptimizer. The last one lost: {self.ending}"
            )

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
        self._take_in(machine, reply.workers)
        failed = reply.failed
        if failed is not None and not failed.is_a(CalledOff):  # which comes after the news
            machine.forget()  # what of the news it took in is not known
        if task is Task.START:
            machine.ready = failed is None
            if failed is None:
                self._failures = 0
            else:
                self._error = self._error or machine.error(failed, task)
                self._lose(machine, f"{failed.text.type_name}: {failed.text.message}", listener)
        elif failed is not None and failed.is_a(AllWorkersLostError, WorkerStartError):
            self._lose(machine, failed.text.message, listener)
        else:
            listener.heard(machine, call, reply)

    def _greeted(self, machine: Machine, theirs: str, host: str) -> None:
        machine.name = host
        for rank in machine.ranks:
            self.infos[rank].host = host
        if theirs != versions():
            self._error = WorkerStartError(
                f"{host} has {theirs}; this process has {versions()}: install the same on both"
            )
            self._lose(machine, str(self._error), Ignore())
        else:
            machine.work(Call(Task.START), [], self._start(machine))

    def _take_in(self, machine: Machine, conditions: Sequence[Condition]) -> None:
        """How the machine's workers are."""
        for rank, condition in zip(machine.ranks, conditions, strict=False):
            info = self.infos[rank]
            info.pid, info.device = condition.pid, torch.device(condition.device)
            info.alive, info.lost = condition.alive, condition.lost
            info.restarts += condition.restarts - machine.restarts.get(rank, 0)
            machine.restarts[rank] = condition.restarts

    def _look_for_hung(self, now: float, listener: NodeListener) -> None:
        patience = self._timeout or ANSWERING
        for machine in list(self.machines.values()):
            working, asked = machine.at(*SHARES), machine.at(Question.PING)
            starting, greeting = machine.at(Task.START), machine.at(Task.HANDSHAKE)
            if asked is not None and now - asked.silent > patience:
                self._lose(machine, f"gave no sign for {patience:.3g} s", listener)
            elif working is not None and asked is None and now - working.silent > patience:
                machine.ask(Question.PING, working, patience)
            elif starting is not None and now - starting.silent > max(self._timeout or UNKNOWN, STARTUP):
                self._lose(machine, "did not start in time", listener)
            elif greeting is not None and now - greeting.silent > 2 * ANSWERING:
                self._lose(machine, "was not placed in time", listener)
            elif not machine.ready and starting is None and greeting is None:
                self._lose(machine, "was forgotten when an interrupt came", listener)

    def _lose(self, machine: Machine, why: str, listener: NodeListener) -> None:
        """The machine is gone, or will not be heard again."""
        first, last = machine.ranks[0], machine.ranks[-1]
        workers = f"worker {first}" if first == last else f"workers {first} to {last}"
        self.ending = f"{machine.name} ({workers}) {why}"
        self.machines.pop(machine.number, None)
        self._failures += 0 if machine.ready else 1
        for rank in machine.ranks:
            self.infos[rank].alive = False
        machine.kill()
        self._look_at = 0.0
        listener.lost(machine, self.ending)

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
        for info in self.infos:
            info.alive = False


def kill(machines: dict[int, Machine]) -> None:
    """End all at once."""
    for machine in machines.values():
        machine.kill()
    machines.clear()
