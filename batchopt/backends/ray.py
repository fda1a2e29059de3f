"""The Ray backend: workers on the machines of a cluster.

    driver (this file)                      ║ network     actor (host.Host), one a machine
                                            ║
    X                 one object an evaluation, however many workers there are on a machine
    skeleton, samples, orders             ──╫──►  Crew: a process backend of that machine
    merged partials   ◄─────────────────────╫───  one, or a few, a machine

Ray places the actors, carries what is sent, and says when one is gone. A machine gets the samples of its share when it is
given that share, and those that it takes over from others when it takes them over. Who evaluates what is decided in
`handout`. A call that Ray reports as failed may have been executed: its machine is not heard again.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from batchopt.backends import Answer, Backend, Meanwhile, Partial, Prepared, Setup, Span, WorkerInfo
from batchopt.backends.cluster import Needs, Room, connect, rooms, spread
from batchopt.backends.constants import check_form, constants, flags
from batchopt.backends.freight import Freight, Shipment, from_bytes, lacking, to_bytes
from batchopt.backends.handout import Ask, Give, Handout
from batchopt.backends.host import Condition, Contract, Reply, Request, Share, State, Yield
from batchopt.backends.machine import Call, Known, Machine
from batchopt.backends.process import STARTUP, UNKNOWN, check_parameters_are_only_read, sending
from batchopt.dispatch import Run
from batchopt.errors import AllWorkersLostError, PoisonChunkError, WorkerLostError, WorkerStartError
from batchopt_workers.batch import Batch
from batchopt_workers.messages import Cut, Order
from batchopt_workers.packing import dumps, pack
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.tree import Node
from batchopt_workers.versions import versions
from batchopt_workers.worker import Hook

# Seconds in which a machine has to answer at all: when it is placed, and when it is asked whether it still works.
ANSWERING = 30.0
# Seconds between two looks at who does not answer, and at where there is room.
INTERVAL = 0.5
# Seconds to wait for what other machines say once one has failed, so that the same error is raised each time.
OTHERS = 0.5
# Bytes from which on an array is put where the machines fetch it, instead of being sent with each message.
LARGE = 100_000
# Seconds to wait for room that others leave.
FREEING = 10.0
# Seconds that a machine has to end its workers.
GRACE = 1.0

# What hears the answers to calls that are not the backend's own.
Heard = Callable[[Machine, Call, Reply], None]


@dataclass(frozen=True)
class Shipped(Prepared):
    """A batch that can be sent in parts."""

    shipment: Shipment


@dataclass(frozen=True)
class _Load:
    """What a step begins with: as of its begin, whenever a machine is told."""

    shipment: Shipment
    training: list[bool]
    requires_grad: list[bool]
    constants: dict[int, bytes]  # digests
    weights: tuple[float, ...]


class RayBackend(Backend):
    """`setup.workers` workers on the machines of a cluster. They end with this object, with this process, or at `close`."""

    def __init__(self, setup: Setup) -> None:
        if setup.flat.vector.device.type != "cpu":
            raise ValueError(
                f"parameters are on {setup.flat.vector.device}: call module.cpu(); workers compute on GPUs where "
                "ray_options={'num_gpus': 1} gives them one"
            )
        if setup.devices is not None:
            raise ValueError("`devices` are of worker processes here; on Ray use ray_options={'num_gpus': 1}")
        check_parameters_are_only_read(setup.program.module)
        self._setup, self._needs = setup, Needs.read(setup.options)
        self._machines: dict[int, Machine] = {}
        self._infos: list[WorkerInfo] = []
        self._numbers = self._attempts = 0  # of machines, and of shares
        self._given_up: dict[int, str] = {}  # why there will be no worker of these ranks any more
        self._restarts = setup.restarts
        self._ending = ""  # of the machine that was lost last
        self._look_at = 0.0
        self._torch = TorchSettings.current()
        self._error: BaseException | None = None  # of a machine that starts
        self._load: _Load | None = None
        self._cut, self._direction = Cut((0,)), None
        self._x: Any = None
        self._paces: dict[tuple[int, int], float] = {}  # seconds a sample of a machine, by kind and number
        with sending("`precode`", setup.precode):
            self._precode = dumps(setup.precode)
        with sending("the module, the criterion or a `loss_fn`", setup.program):
            packed = pack(setup.program, setup.parameters)
        self._constants = constants(setup.program.module)
        self._forms = [(tensor.shape, tensor.dtype) for _, tensor in self._constants]
        self._digests = dict(enumerate(self._look_at_constants()))
        self._first = dict(self._digests)
        self._changed: dict[int, Any] = {}  # what constants are now that have changed since
        self.set_hooks(setup.prehook, setup.posthook)
        self._ray = connect()
        self._program = self._ray.put(Freight.of(packed))
        self._end = weakref.finalize(self, _kill, self._machines)
        try:
            self.resize(setup.workers)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[WorkerInfo]:
        return self._infos

    # ---- what machines have to know

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        packed = []
        for name, hook in (("`prehook`", prehook), ("`posthook`", posthook)):
            with sending(name, hook):
                packed.append(dumps(hook))
        self._hooks = tuple(packed)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        with sending("the batch", batch):
            return Shipped(batch, Shipment.of(batch))

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, Shipped)
        self._attend()
        for i, digest in enumerate(self._look_at_constants()):
            if digest != self._digests[i]:
                self._digests[i], self._changed[i] = digest, to_bytes(self._tensor(i)).copy()
        modes = flags(self._setup.program.module, self._setup.parameters)
        self._load = _Load(prepared.shipment, *modes, dict(self._digests), weights)

    def set_direction(self, direction: torch.Tensor) -> None:
        self._direction = self._published(to_bytes(direction).copy())

    def _tensor(self, i: int) -> torch.Tensor:
        owner, name = self._constants[i][0]
        found = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
        assert found is not None
        check_form((owner, name), found, *self._forms[i])
        return found.detach()

    def _look_at_constants(self) -> list[bytes]:
        """A digest of each. A version counter would not do: `.data` and batch normalisation go past it."""
        strided = (self._tensor(i) for i in range(len(self._constants)))
        return [
            hashlib.blake2b(to_bytes(tensor).data, digest_size=16).digest() if tensor.layout is torch.strided else b""
            for tensor in strided
        ]

    def _news(self, machine: Machine) -> list[Request]:
        """What the machine does not know yet."""
        known = machine.known
        news: list[Request] = []
        if known.hooks is not self._hooks:
            news.append(("set_hooks", self._hooks))
        if known.load is not self._load and self._load is not None:
            changed = [
                (i, self._changed[i])
                for i, d in self._load.constants.items()
                if known.constants.get(i, self._first[i]) != d
            ]
            state = State(self._load.training, self._load.requires_grad, changed)
            news.append(("load", (self._load.shipment.skeleton, state, self._load.weights)))
        if known.cut is not self._cut:
            news.append(("set_cut", (self._cut.bounds,)))
        return news

    def _told(self, machine: Machine) -> None:
        """The machine was sent the news."""
        known = machine.known
        if known.load is not self._load and self._load is not None:
            known.samples, known.constants = [], dict(self._load.constants)
        known.hooks, known.load, known.cut = self._hooks, self._load, self._cut

    def _published(self, elements: Any) -> Any:
        """As an argument: the array itself, or where it can be fetched."""
        return self._ray.put(elements) if elements.nbytes > LARGE else elements

    def _give(self, machine: Machine, task: str, order: Order, runs: tuple[Run | None, ...]) -> None:
        """Send a share, with what the machine lacks for it."""
        assert self._load is not None
        self._attempts += 1
        share = Share(int(order.kind), self._attempts, order.step, runs)
        call = Call("evaluate", order.evaluation, share.attempt)
        news = self._news(machine)
        held = [] if machine.known.load is not self._load else machine.known.samples
        wanted = [range(self._cut.bounds[run.first], self._cut.bounds[run.last]) for run in runs if run is not None]
        missing = [part for samples in wanted for part in lacking(held, samples)]
        if missing:
            with sending("the batch", *(part.inputs.data for part in self._load.shipment.batch.parts)):
                fragments = [fragment for part in missing for fragment in self._load.shipment.fragments(part)]
            news.append(("fill", (fragments,)))
        known = machine.known
        x = None if known.x is self._x else self._x
        direction = None if known.direction is self._direction else self._direction
        machine.work(call, news, (task, (share,)), x, direction)
        self._told(machine)
        known.samples = known.samples + missing
        known.x, known.direction = self._x, self._direction

    # ---- evaluating

    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        round = _Round(self, cut, orders)
        self._cut = self._cut if self._cut.bounds == cut.bounds else cut
        self._x = self._published(to_bytes(self._setup.flat.vector))
        self._attend()
        try:
            while round.handout.missing and not round.failures:
                for machine in self._machines.values():
                    if machine.ready and machine.number not in round.shares:
                        round.joined(machine)
                idle = [m.number for m in self._machines.values() if m.ready and not m.works_on(round.evaluation)]
                for command in round.handout.decide(idle, round.estimate, time.monotonic()):
                    self._carry_out(command, round)
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                waits = len(round.handout.busy) < len(self._machines)
                self._pump(
                    round.heard, round.handout.next_late(round.estimate, time.monotonic()) if waits else math.inf, round
                )
        finally:
            self._call_off(round.evaluation)
        if round.failures:
            deadline = time.monotonic() + OTHERS
            while time.monotonic() < deadline and any(m.works_on(round.evaluation) for m in self._machines.values()):
                self._pump(round.heard, deadline, round)
            raise round.first_failure()
        return round.answers()

    def _carry_out(self, command: Give | Ask, round: _Round) -> None:
        machine = self._machines[command.machine]
        if isinstance(command, Ask):
            share = machine.works_on(round.evaluation)
            assert share is not None
            machine.ask("release", share, ANSWERING)
        else:
            self._give(machine, "evaluate", round.order, command.runs)

    def _call_off(self, evaluation: int) -> None:
        for machine in self._machines.values():
            share = machine.works_on(evaluation)
            if share is not None:
                machine.ask("call off", share, ANSWERING)

    def probe(self, cut: Cut, order: Order) -> dict[int, float]:
        self._attend()
        self._cut, self._x = cut, self._published(to_bytes(self._setup.flat.vector))
        run = Run(order.first, order.last)
        probe = _Probe(order.evaluation)
        for machine in self._machines.values():
            if machine.ready:
                self._give(machine, "probe", order, (run, *(None for _ in machine.ranks[1:])))
        try:
            while any(m.works_on(order.evaluation) for m in self._machines.values()) and not probe.failures:
                if time.monotonic() >= probe.patience:
                    break
                self._pump(probe.heard, probe.patience)
        finally:
            self._call_off(order.evaluation)
        if probe.failures:
            raise probe.failures[0]
        return probe.seconds

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with sending("the function or an argument", function, *arguments):
            message = dumps((function, arguments))
        self._attend()
        while any(not machine.ready for machine in self._machines.values()):
            self._pump(_ignore, math.inf)
        results: dict[int, bytes] = {}
        failures: list[BaseException] = []

        def heard(machine: Machine, call: Call, reply: Reply) -> None:
            if call.what == "run":
                if reply.failed is not None:
                    failures.append(machine.error(reply.failed, "running a function"))
                else:
                    results.update(zip(machine.ranks, reply.value, strict=True))

        asked = list(self._machines.values())
        for machine in asked:
            machine.work(Call("run"), self._news(machine), ("run", (message,)))
            self._told(machine)
        while any(machine.at("run") for machine in asked):
            self._pump(heard, math.inf)
            if any(machine.number not in self._machines for machine in asked):
                raise WorkerLostError(f"a function was not run to its end: {self._ending}")
        if failures:
            raise min(failures, key=lambda error: getattr(error, "rank", math.inf))
        return [pickle.loads(body) for _, body in sorted(results.items())]

    # ---- machines that live

    def resize(self, workers: int) -> None:
        before = len(self._infos)
        for machine in list(self._machines.values()):
            kept = sum(rank < workers for rank in machine.ranks)
            if not kept:
                self._forget(machine)
                machine.kill()
            else:
                machine.ranks = machine.ranks[:kept]
        self._infos = self._infos[:workers]
        self._given_up = {rank: why for rank, why in self._given_up.items() if rank < workers}
        for machine in self._machines.values():
            machine.work(Call("resize"), [], ("resize", (len(machine.ranks), workers)))
        self._infos += [WorkerInfo(rank, 0, "", torch.device("cpu"), alive=False) for rank in range(before, workers)]
        try:
            if workers > before:
                self._place(range(before, workers), self._room_for(workers - before))
            until = time.monotonic() + ANSWERING
            while waiting := [machine for machine in self._machines.values() if not machine.ready]:
                self._pump(_ignore, until)
                self._raise_error()
                if any(machine.at("greet") for machine in waiting) and time.monotonic() >= until:
                    raise WorkerStartError(
                        f"no worker was placed within {ANSWERING:.0f} s: is the cluster busy? `ray status` tells"
                    )
        except BaseException:
            if before:
                self.resize(before)
            raise

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

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
        return sum(room.workers for room in rooms(self._ray, self._needs)) - len(self._homeless)

    def _place(self, ranks: Sequence[int], places: Sequence[Room]) -> None:
        """Start the workers of these ranks there."""
        at = 0
        for place in places:
            machine = Machine(self._ray, self._numbers, place.node, tuple(ranks[at : at + place.workers]), self._needs)
            at += place.workers
            self._numbers += 1
            self._machines[machine.number] = machine
            machine.greet()

    @property
    def _homeless(self) -> list[int]:
        """The ranks of workers that are on no machine."""
        placed = {rank for machine in self._machines.values() for rank in machine.ranks}
        return [info.rank for info in self._infos if info.rank not in placed and info.rank not in self._given_up]

    def _replenish(self) -> None:
        """Place the workers whose machine was lost, as far as there is room and it is allowed."""
        homeless = self._homeless
        if homeless:
            free = rooms(self._ray, self._needs)
            fit = min(len(homeless), sum(room.workers for room in free), max(self._restarts, 0))
            if self._restarts <= 0:
                why = f"max_restarts is spent; the last machine lost: {self._ending}"
                self._given_up.update(dict.fromkeys(homeless, why))
            self._place(homeless[:fit], spread(fit, free))
            self._restarts -= fit
            for rank in homeless[:fit]:
                self._infos[rank].restarts += 1
        placed = {rank for machine in self._machines.values() for rank in machine.ranks}
        for info in self._infos:
            info.lost = info.rank not in placed

    def _attend(self) -> None:
        """Hear what there is to be heard, and replace what is gone. Raises `AllWorkersLostError`."""
        self._pump(_ignore, 0.0)
        self._raise_if_alone()

    def _raise_if_alone(self) -> None:
        if not self._machines and self._infos and not self._homeless:
            raise AllWorkersLostError(
                f"no worker is left, and none may be started: build a new BatchOptimizer. {self._ending}"
            )

    def _pump(self, heard: Heard, until: float, round: _Round | None = None) -> None:
        """Mend, wait until a machine answers (or until that time), and tell `heard`; `round` of machines lost."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + INTERVAL
            self._look_for_hung(now, round)
            self._replenish()
            self._raise_if_alone()
        calls = {ref: (machine, call) for machine in self._machines.values() for ref, call in machine.calls.items()}
        timeout = max(0.0, min(until, self._look_at) - now)
        if not calls:
            time.sleep(timeout)
            return
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        if not ready and timeout:
            ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        for reference in ready:
            machine, call = calls[reference]
            if machine.calls.pop(reference, None) is not None:
                self._hear(machine, call, reference, heard, round)

    def _hear(self, machine: Machine, call: Call, reference: Any, heard: Heard, round: _Round | None) -> None:
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._lose(machine, _ended(error), round)
            return
        if call.what == "greet":
            self._greeted(machine, *value)
        elif call.what in ("release", "ping", "call off"):
            if value is None:
                self._lose(machine, f"did not answer for {ANSWERING:.0f} s", round)
            elif call.what == "release" and round is not None and call.evaluation == round.evaluation:
                round.handout.released(machine.number, [Run(*run) for run in value])
        else:
            self._take_in(machine, value.workers)
            if value.failed is not None:
                machine.known = Known()  # what of the news it took in is not known
                if value.failed.name in ("AllWorkersLostError", "WorkerStartError") and call.what != "start":
                    self._lose(machine, str(value.failed.arguments[0]), round)
                    return
            if call.what == "start":
                self._started(machine, value)
            heard(machine, call, value)

    def _greeted(self, machine: Machine, theirs: str, host: str) -> None:
        machine.name = host
        if theirs != versions():
            self._error = WorkerStartError(
                f"{host} has {theirs}; this process has {versions()}: install the same on both"
            )
            self._lose(machine, str(self._error))
            return
        setup = self._setup
        threads = setup.threads or self._needs.threads
        devices = None
        if self._needs.gpus:
            devices = tuple(torch.device("cuda", int(i * self._needs.gpus)) for i in range(len(machine.ranks)))
        restarts = math.ceil(setup.restarts * len(machine.ranks) / len(self._infos))
        contract = Contract(
            setup.flat.layout,
            self._precode,
            setup.fixed_bits,
            setup.timeout,
            restarts,
            threads,
            devices,
            machine.ranks,
            len(self._infos),
            self._torch,
        )
        machine.work(Call("start"), [], ("start", (contract, *self._hooks)), self._program)
        machine.known.hooks = self._hooks

    def _started(self, machine: Machine, reply: Reply) -> None:
        if reply.failed is not None:
            error = machine.error(reply.failed, "receiving the module")
            self._error = self._error or error
            self._lose(machine, str(error))
            return
        machine.ready = True
        for rank in machine.ranks:
            self._infos[rank].host = machine.name

    def _take_in(self, machine: Machine, conditions: Sequence[Condition]) -> None:
        """How the machine's workers are."""
        for rank, condition in zip(machine.ranks, conditions, strict=False):
            info = self._infos[rank]
            info.pid, info.device, info.alive = condition.pid, torch.device(condition.device), condition.alive
            info.restarts += condition.restarts - machine.restarts.get(rank, 0)
            machine.restarts[rank] = condition.restarts

    def _look_for_hung(self, now: float, round: _Round | None) -> None:
        for machine in list(self._machines.values()):
            patience = self._setup.timeout or ANSWERING
            working, asked = machine.at("evaluate"), machine.at("ping")
            starting, greeting = machine.at("start"), machine.at("greet")
            if asked is not None and now - asked.since > patience:
                self._lose(machine, f"made no sign for {patience:.3g} s", round)
            elif working is not None and asked is None and now - working.since > patience:
                machine.ask("ping", working, patience)
            elif starting is not None and now - starting.since > max(self._setup.timeout or UNKNOWN, STARTUP):
                self._lose(machine, "did not start in time", round)
            elif greeting is not None and now - greeting.since > 2 * ANSWERING:
                self._lose(machine, "was not placed in time", round)

    def _lose(self, machine: Machine, why: str, round: _Round | None = None) -> None:
        """The machine is gone, or will not be heard again."""
        self._ending = f"machine {machine.name} (workers {_ranks(machine.ranks)}): {why}"
        self._forget(machine)
        machine.kill()
        self._look_at = 0.0
        if round is not None:
            round.lost(machine, self._ending)

    def _forget(self, machine: Machine) -> None:
        self._machines.pop(machine.number, None)
        self._paces = {key: pace for key, pace in self._paces.items() if key[1] != machine.number}
        for rank in machine.ranks:
            self._infos[rank].alive = False

    def close(self) -> None:
        asked = []
        for machine in self._machines.values():
            if machine.ready:
                machine.calls.clear()
                machine.work(Call("close"), [], ("close", ()))
                asked += list(machine.calls)
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=GRACE)
        _kill(self._machines)
        for info in self._infos:
            info.alive = False


def _kill(machines: dict[int, Machine]) -> None:
    for machine in machines.values():
        machine.kill()
    machines.clear()


def _ignore(machine: Machine, call: Call, reply: Reply) -> None:
    """Nobody waits for this."""


def _ended(error: BaseException) -> str:
    """How Ray says that an actor ended, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:2000]


def _ranks(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}"


class _Round:
    """Takes in what machines say of one evaluation."""

    def __init__(self, backend: RayBackend, cut: Cut, orders: Sequence[Order | None]) -> None:
        self.order = next(order for order in orders if order is not None)
        self.evaluation = self.order.evaluation
        self.failures: list[BaseException] = []
        self.shares: dict[int, Machine] = {}
        self._cut, self._backend, self._batch = cut, backend, backend._load
        self._kind, self._dtype = int(self.order.kind), backend._setup.flat.layout.sum_dtype
        self._yields: dict[int, tuple[Machine, Yield, float]] = {}  # by the share's number
        runs = [None if order is None else Run(order.first, order.last) for order in orders]
        ready = [machine for machine in backend._machines.values() if machine.ready]
        shares = {machine.number: [runs[rank] for rank in machine.ranks] for machine in ready}
        placed = {rank for machine in ready for rank in machine.ranks}
        others = [run for rank, run in enumerate(runs) if run is not None and rank not in placed]
        self.shares = {machine.number: machine for machine in ready}
        self.handout = Handout(shares, others, cut.chunks)

    def joined(self, machine: Machine) -> None:
        """There is another machine."""
        self.shares[machine.number] = machine
        self.handout.joined(machine.number, len(machine.ranks))

    def estimate(self, machine: int, runs: Sequence[Run]) -> float | None:
        """The seconds that the runs should take there, by its last work or else by that of the slowest."""
        paces = {number: pace for (kind, number), pace in self._backend._paces.items() if kind == self._kind}
        pace = paces.get(machine, max(paces.values(), default=None))
        return None if pace is None else pace * sum(self._samples(run) for run in runs)

    def _samples(self, run: Run) -> int:
        return self._cut.bounds[run.last] - self._cut.bounds[run.first]

    def heard(self, machine: Machine, call: Call, reply: Reply) -> None:
        """An answer; one of another evaluation is late, and does not count."""
        if call.what != "evaluate" or call.evaluation != self.evaluation:
            return
        if reply.failed is not None:
            self.handout.answered(machine.number, [])
            if reply.failed.name != "CalledOff":
                self.failures.append(machine.error(reply.failed, "evaluating"))
            return
        found: Yield = reply.value
        if found.attempt in self._yields:  # said twice
            return
        self._yields[found.attempt] = machine, found, call.since
        nodes = [Node(s.level, s.position) for s in found.sums]
        chunks = self._cut.chunks
        done = [Run(node.first_chunk, node.first_chunk + node.chunks(chunks)) for node in nodes]
        samples = sum(map(self._samples, done))
        if samples:
            self._backend._paces[self._kind, machine.number] = found.seconds / samples
        self.handout.answered(machine.number, done)

    def lost(self, machine: Machine, ending: str) -> None:
        """The machine is gone; what it has answered stands."""
        chunk = self.handout.lost(machine.number)
        if chunk is not None:
            samples = range(self._cut.bounds[chunk], self._cut.bounds[chunk + 1])
            assert self._batch is not None
            terms = self._batch.shipment.batch.numbering.within(samples)
            self.failures.append(PoisonChunkError(chunk, samples, ending, terms))

    def first_failure(self) -> BaseException:
        """The one to be raised: that of the first samples."""

        def place(error: BaseException) -> tuple[float, float]:
            samples = getattr(error, "samples", None)
            return samples.start if samples else math.inf, getattr(error, "rank", math.inf)

        return min(self.failures, key=place)

    def answers(self) -> list[Answer]:
        """What each worker contributed; the merged partials of a machine are with its first worker's."""
        count = sum(len(found.sums) for _, found, _ in self._yields.values())
        merged: list[Answer] = []
        for machine, found, began in self._yields.values():
            partials = list(self._partials(found, writable=count > 2))
            for i, work in enumerate(found.work):
                spans = [Span(_perf(began) + at, seconds, first, last) for at, seconds, first, last in work.spans]
                results = pickle.loads(work.results) if work.results else {}
                rank = machine.ranks[work.worker]
                merged.append(Answer(rank, work.samples, work.seconds, partials if i == 0 else [], results, spans))
        return sorted(merged, key=lambda answer: answer.rank)

    def _partials(self, found: Yield, writable: bool) -> Iterator[tuple[Node, Partial]]:
        """In memory that can be written where sums will be made in it: what came over the network is only to be read."""
        for s in found.sums:
            gradient = from_bytes(s.gradient, self._dtype, (-1,))
            changes = from_bytes(s.changes, torch.float64, (-1,)).clone()
            yield (
                Node(s.level, s.position),
                Partial(s.losses, gradient.clone() if writable else gradient, changes, s.used),
            )


def _perf(since: float) -> float:
    """The moment `since` of the monotonic clock on that of `time.perf_counter`."""
    return since - time.monotonic() + time.perf_counter()


class _Probe:
    """Takes in how long each worker needs for the same run, and does not wait long for those that are much slower."""

    def __init__(self, evaluation: int) -> None:
        self.seconds: dict[int, float] = {}
        self.failures: list[BaseException] = []
        self.patience = math.inf
        self._evaluation = evaluation

    def heard(self, machine: Machine, call: Call, reply: Reply) -> None:
        """Done, or failed."""
        if call.what != "evaluate" or call.evaluation != self._evaluation:
            return
        if reply.failed is not None:
            self.failures.append(machine.error(reply.failed, "being measured"))
            return
        self.seconds.update({machine.ranks[worker]: seconds for worker, seconds in reply.value.items()})
        self.patience = time.monotonic() + 10.0 * max(self.seconds.values(), default=0.0) + 1.0
