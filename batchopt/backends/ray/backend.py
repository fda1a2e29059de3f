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

import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import Backend, Meanwhile, Prepared, Setup, WorkerInfo
from batchopt.backends.gather import Ignore
from batchopt.backends.ledger import Run
from batchopt.backends.patience import OTHERS
from batchopt.backends.ray.actor import Host, request
from batchopt.backends.ray.cluster import Needs, capacity, connect
from batchopt.backends.ray.editions import Edition, Editions, delivery
from batchopt.backends.ray.gather import NodeCalls, NodeGather, NodeProbe
from batchopt.backends.ray.messages import Contract, Question, Request, Share, Task
from batchopt.backends.ray.node import Call, Machine
from batchopt.backends.ray.nodes import Fleet, NodeListener, kill
from batchopt.backends.ray.roster import ANSWERING
from batchopt.backends.ray.scheduler import Ask, Give
from batchopt.backends.ray.transfer import Shipment, copied, lacking, to_bytes
from batchopt.backends.sendable import check_parameters_are_only_read, sending
from batchopt_workers.batch import Batch
from batchopt_workers.evaluate import Program
from batchopt_workers.messages import ORDERS, Cut, Kind, Order
from batchopt_workers.module_hooks import module_hooks
from batchopt_workers.packing import dumps
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.worker import Hook

# Bytes from which on an array is put where the machines fetch it, instead of being sent with each message.
LARGE = 100_000
# Bytes a second that a network carries at least: samples that take longer to send than to evaluate change hands only when
# nobody else has them.
BANDWIDTH = 1e8


@dataclass(frozen=True)
class Shipped(Prepared):
    """A batch that can be sent in parts."""

    shipment: Shipment


@dataclass(frozen=True)
class _Load:
    """What a step begins with: as of its begin, whenever a machine is told."""

    shipment: Shipment
    edition: Edition
    weights: tuple[float, ...]


class RayBackend(Backend):
    """`setup.workers` workers on the machines of a cluster. They end with this object, with this process, or at `close`."""

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        return None if parallelize == "auto" else read_parallelize(parallelize)

    @classmethod
    def check(cls, setup: Setup) -> None:
        Needs.read(setup.options)
        if setup.flat.vector.device.type != "cpu":
            raise ValueError(
                f"parameters are on {setup.flat.vector.device}: call module.cpu(); workers compute on GPUs where "
                "ray_options={'num_gpus': 1} gives them one"
            )
        if setup.devices is not None:
            raise ValueError("`devices` are of worker processes here; on Ray use ray_options={'num_gpus': 1}")
        check_parameters_are_only_read(setup.program.module)

    def __init__(self, setup: Setup) -> None:
        self._setup, self._needs = setup, Needs.read(setup.options)
        self._torch = TorchSettings.current()
        self._step: _Load | None = None
        self._cut = Cut((0,))
        self._x: Any = None
        self._direction: Any = None
        self._attempts = 0  # shares given so far
        self._paces: dict[Kind, dict[int, float]] = {kind: {} for kind in ORDERS}
        with sending("`precode`", setup.precode):
            self._precode = dumps(setup.precode)
        self._program, self._hooked = setup.program, True
        self._editions = Editions(setup.program, setup.parameters)
        self._oldest = self._editions.latest
        self._ray = connect()
        self._first = self._ray.put(self._editions.first)
        workers = setup.workers or max(capacity(self._ray, self._needs), 1)
        self._restarts = setup.restarts_of(workers)
        self._fleet = Fleet(self._ray, self._needs, self._start, self._restarts, setup.timeout)
        self._end = weakref.finalize(self, kill, self._fleet.machines)
        try:
            self.resize(workers)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[WorkerInfo]:
        return self._fleet.roster.infos

    # ---- what machines have to know

    def _start(self, machine: Machine) -> Request:
        setup, workers, all_ = self._setup, len(machine.ranks), len(self._fleet.roster.infos)
        gpus = self._needs.gpus
        contract = Contract(
            layout=setup.flat.layout,
            precode=self._precode,
            fixed_bits=setup.fixed_bits,
            timeout=setup.timeout,
            restarts=math.ceil(self._restarts * workers / all_),
            threads=setup.threads or self._needs.threads,
            devices=tuple(torch.device("cuda", int(i * gpus)) for i in range(workers)) if gpus else None,
            ranks=machine.ranks,
            world=all_,
            torch=self._torch,
            digests=self._oldest.digests,
        )
        known = machine.known
        known.torch, known.edition, known.program = self._torch, self._oldest, self._oldest.packed.data
        known.tensors = known.earlier_tensors = frozenset(self._oldest.digests)
        return request(Host.start, contract, self._first)

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        self._use(replace(self._program, prehook=prehook, posthook=posthook))

    def use_hooks(self, hooked: bool) -> None:
        self._hooked = hooked

    def include_state(self, names: Collection[str]) -> None:
        self._use(replace(self._program, state=self._program.state | set(names)))

    def _use(self, program: Program) -> None:
        """Evaluate this program from now on. Raises `TypeError` if it cannot be sent."""
        before, self._program = self._program, program
        try:
            self._follow()
        except BaseException:
            self._program = before
            raise
        if self._step is not None:
            self._step = replace(self._step, edition=self._editions.latest)

    def _follow(self) -> None:
        if self._program.module_hooks != module_hooks():
            self._program = replace(self._program, module_hooks=module_hooks())
        self._editions.follow(self._program)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        before = None if self._step is None else self._step.shipment
        with sending("the batch", batch):
            # What is read ahead may be written over while the one before is still sent.
            return Shipped(batch, Shipment.of(copied(batch)) if ahead else Shipment.after(before, batch))

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, Shipped)
        self._fleet.pump(Ignore(), 0.0)
        self._follow()
        self._step = _Load(prepared.shipment, self._editions.latest, weights)

    def set_direction(self, direction: torch.Tensor) -> None:
        self._direction = self._published(to_bytes(direction).copy())

    def _news(self, machine: Machine) -> list[Request]:
        """What the machine does not know yet; it is sent right after."""
        known, step = machine.known, self._step
        news: list[Request] = []
        if known.hooked != self._hooked:
            news.append(request(Host.use_hooks, self._hooked))
        if known.torch != self._torch:
            news.append(request(Host.set_torch, self._torch))
        if step is not None and known.load is not step:
            edition = step.edition
            if known.edition is not edition:
                news.append(request(Host.update, delivery(edition, known.program, known.tensors)))
            skeleton = None if known.shipment is step.shipment else step.shipment.skeleton
            news.append(request(Host.load, skeleton, step.weights))
        if known.cut is not self._cut:
            news.append(request(Host.set_cut, self._cut.bounds))
        return news

    def _told(self, machine: Machine) -> None:
        """The machine was sent the news."""
        known, step = machine.known, self._step
        if step is not None and known.load is not step:
            known.samples = known.samples if known.shipment is step.shipment else []
            known.shipment = step.shipment
            if known.edition is not step.edition:
                known.edition, known.program = step.edition, step.edition.packed.data
                known.earlier_tensors, known.tensors = known.tensors, frozenset(step.edition.digests)
        known.hooked, known.torch, known.load, known.cut = self._hooked, self._torch, step, self._cut

    def _published(self, elements: Any) -> Any:
        """As an argument: the array itself, or where it can be fetched."""
        return self._ray.put(elements) if elements.nbytes > LARGE else elements

    def _publish_x(self) -> None:
        self._x = self._published(to_bytes(self._setup.flat.vector))

    def _give(self, machine: Machine, task: Task, order: Order, runs: tuple[Run | None, ...]) -> None:
        """Send a share, with what the machine lacks for it."""
        assert self._step is not None
        self._attempts += 1
        call = Call(task, order.evaluation, self._attempts)
        share = Share(int(order.kind), call.attempt, order.step, runs)
        known, bounds, shipment = machine.known, self._cut.bounds, self._step.shipment
        news = self._news(machine)
        held = known.samples if known.shipment is shipment else []
        for run in runs:
            if run is not None:
                lacked = lacking(held, range(bounds[run.first], bounds[run.last]))
                with sending("the batch", *(part.inputs.data for part in shipment.batch.parts)):
                    news += [request(Host.fill, list(shipment.fragments(samples))) for samples in lacked]
                held = held + lacked
        x = None if known.x is self._x else self._x
        direction = None if known.direction is self._direction else self._direction
        method = Host.evaluate if task is Task.EVALUATE else Host.probe
        machine.work(call, news, request(method, share, x, direction))
        self._told(machine)
        known.samples, known.x, known.direction = held, self._x, self._direction

    # ---- evaluating

    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        fleet = self._fleet
        fleet.pump(Ignore(), 0.0)
        self._torch = TorchSettings.current()
        assert self._step is not None
        shipment, dtype = self._step.shipment, self._setup.flat.layout.sum_dtype
        price = shipment.bytes_a_sample / BANDWIDTH
        harvest = NodeGather(fleet.ready, cut, orders, shipment.batch.numbering, self._paces, dtype, price)
        evaluation, handout = harvest.order.evaluation, harvest.handout
        self._cut = self._cut if self._cut.bounds == cut.bounds else cut
        self._publish_x()
        try:
            while handout.missing and not harvest.failures:
                harvest.present(fleet.ready)
                idle = [machine.number for machine in fleet.ready if not machine.works_on(evaluation)]
                for command in handout.decide(idle, harvest.estimate, time.monotonic()):
                    self._carry_out(command, harvest.order)
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                somebody_waits = len(handout.busy) < len(fleet.machines)
                late = handout.next_late(harvest.estimate, time.monotonic()) if somebody_waits else math.inf
                fleet.pump(harvest, late)
            if harvest.failures:  # so that the same one is raised each time
                self._pump_while_working(harvest, evaluation, time.monotonic() + OTHERS)
        finally:
            self._call_off(evaluation)
        if harvest.failures:
            raise harvest.failures.first()
        return harvest.answers()

    def _carry_out(self, command: Give | Ask, order: Order) -> None:
        machine = self._fleet.machines[command.machine]
        if isinstance(command, Give):
            self._give(machine, Task.EVALUATE, order, command.runs)
        else:
            share = machine.works_on(order.evaluation)
            assert share is not None
            machine.ask(Question.RELEASE, share, ANSWERING)

    def _pump_while_working(self, listener: NodeListener, evaluation: int, until: float) -> None:
        while time.monotonic() < until and any(machine.works_on(evaluation) for machine in self._fleet.ready):
            self._fleet.pump(listener, until)

    def _call_off(self, evaluation: int) -> None:
        for machine in self._fleet.ready:
            share = machine.works_on(evaluation)
            if share is not None:
                machine.ask(Question.CALL_OFF, share, ANSWERING)

    def probe(self, cut: Cut, order: Order) -> dict[int, float]:
        fleet, probe = self._fleet, NodeProbe(order.evaluation)
        fleet.pump(Ignore(), 0.0)
        self._torch = TorchSettings.current()
        self._cut = cut
        self._publish_x()
        for machine in fleet.ready:
            run = Run(order.first, order.last)
            self._give(machine, Task.PROBE, order, (run, *(None for _ in machine.ranks[1:])))
            probe.asked(machine)
        try:
            probe.collect(lambda until: fleet.pump(probe, until))
        finally:
            self._call_off(order.evaluation)
        if probe.failures:
            raise probe.failures.first()
        return probe.seconds

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with sending("the function or an argument", function, *arguments):
            message = dumps((function, arguments))
        fleet, calls = self._fleet, NodeCalls()
        fleet.pump(Ignore(), 0.0)
        while len(fleet.ready) < max(len(fleet.machines), 1):  # those that are being replaced, too
            fleet.pump(Ignore(), math.inf)
        for machine in fleet.ready:
            machine.work(Call(Task.RUN), self._news(machine), request(Host.run, message))
            self._told(machine)
            calls.asked(machine)
        return calls.collect(lambda until: fleet.pump(calls, until))

    def resize(self, workers: int) -> None:
        self._fleet.resize(workers)

    def room(self) -> int:
        return self._fleet.room()

    def stop(self) -> None:
        self._fleet.stop()

    def close(self) -> None:
        self._fleet.close()
