"""The Ray backend: workers on the machines of a cluster.

    parent (this file)                      ║ network     an actor on each node (actor.NodeActor)
                                            ║
    X                 one object an evaluation, however many workers a node has
    manifest, slices, assignments         ──╫──►  NodeWorkers: worker processes of that machine
    merged partials   ◄─────────────────────╫───  one, or a few, a node

Ray places the actors, carries what is sent, and says when one is gone. A node gets the samples of the chunks that it is
given, when it is given them. Who evaluates what is decided in `scheduler`, what a node has to be sent in `node_state`,
who is replaced in `roster`. A call that Ray reports as failed may have been executed: its node is not heard again.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._mapreduce.answers import Answer
from batchopt.backends.base import CompressingBackend, Meanwhile, Prepared, Setup, WorkerInfo
from batchopt.backends.gather import Ignore
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.patience import OTHERS
from batchopt.backends.ray.actor import NodeActor, request
from batchopt.backends.ray.cells import CellReduce
from batchopt.backends.ray.cluster import Needs, capacity, connect
from batchopt.backends.ray.gather import NodeCalls, NodeGather, NodeProbe
from batchopt.backends.ray.messages import Assignment, Cells, NodeRequest, NodeSetup, NodeTask, Question, RowsMessage
from batchopt.backends.ray.node import ClusterNode, PendingRequest
from batchopt.backends.ray.node_state import NodeState, StepStart, Target, TaskStart
from batchopt.backends.ray.nodes import NodeListener, Nodes, kill
from batchopt.backends.ray.program_versions import ProgramVersions
from batchopt.backends.ray.roster import ANSWERING
from batchopt.backends.ray.scheduler import Ask, Give
from batchopt.backends.ray.transfer import PackedBytes, SendableBatch, copied, from_bytes, to_bytes
from batchopt.backends.sendable import check_module, sending
from batchopt_workers.batch import Batch
from batchopt_workers.evaluate import Program
from batchopt_workers.forms import Column
from batchopt_workers.messages import ORDERS, TASKS, Cut, Kind, Order
from batchopt_workers.module_hooks import module_hooks
from batchopt_workers.packing import dumps, pack
from batchopt_workers.task import Task
from batchopt_workers.task_runner import of_term
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.worker import Hook

# Bytes from which on an array is put where the nodes fetch it, instead of being sent with each message.
LARGE = 100_000
# Bytes a second that a network carries at least: samples that take longer to send than to evaluate change hands only
# when nobody else has them.
BANDWIDTH = 1e8


@dataclass(frozen=True)
class SlicedBatch(Prepared):
    """A batch of which each node is sent what it needs."""

    sendable: SendableBatch


class RayBackend(CompressingBackend):
    """`setup.workers` workers on the nodes of a cluster. They end with this object, with this process, or at
    `close`."""

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
        check_module(setup.program.module)

    def __init__(self, setup: Setup) -> None:
        self._setup, self._needs = setup, Needs.read(setup.options)
        self._torch = TorchSettings.current()
        self._step: StepStart | None = None
        self._cut = Cut((0,))
        self._task: TaskStart | None = None
        self._whole = False  # whether the task evaluates the loaded batch, all of it
        self._task_cut: Cut | None = None
        self._keeps_outputs = False
        self._rows: list[RowsMessage] = []  # what was collected
        self._x: Any = None  # X and the direction, or references to them
        self._direction: Any = None
        self._attempts = 0  # assignments given so far
        self._paces: dict[Kind, dict[int, float]] = {kind: {} for kind in ORDERS}
        with sending("`precode`", setup.precode):
            self._precode = dumps(setup.precode)
        self._program, self._hooked = setup.program, True
        self._versions = ProgramVersions(setup.program, setup.parameters)
        self._oldest = self._versions.latest
        self._ray = connect()
        self._first = self._ray.put(self._versions.first)
        workers = setup.workers or max(capacity(self._ray, self._needs), 1)
        self._restarts = setup.restarts_of(workers)
        self._nodes = Nodes(self._ray, self._needs, self._start, self._restarts, setup.timeout)
        self._cells = None
        if setup.compression is not None:
            self._cells = CellReduce(setup.compression, self._nodes, setup.flat.layout, setup.fixed_bits)
        self._end = weakref.finalize(self, kill, self._nodes.by_number)
        try:
            self.resize(workers)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[WorkerInfo]:
        return self._nodes.roster.infos

    # ---- what nodes must have

    def _start(self, node: ClusterNode) -> NodeRequest:
        """The request that starts a node's workers."""
        setup, workers, all_ = self._setup, len(node.ranks), len(self._nodes.roster.infos)
        gpus = self._needs.gpus
        node_setup = NodeSetup(
            layout=setup.flat.layout,
            precode=self._precode,
            fixed_bits=setup.fixed_bits,
            timeout=setup.timeout,
            restarts=math.ceil(self._restarts * workers / all_),
            threads=setup.threads or self._needs.threads,
            devices=tuple(torch.device("cuda", int(i * gpus)) for i in range(workers)) if gpus else None,
            ranks=node.ranks,
            world=all_,
            torch=self._torch,
            digests=self._oldest.digests,
        )
        node.state = NodeState.started_with(self._torch, self._oldest)
        return request(NodeActor.start, node_setup, self._first)

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
        self._use_latest()

    def _use_latest(self) -> None:
        latest = self._versions.latest
        if self._step is not None and self._step.version is not latest:
            self._step = replace(self._step, version=latest)
        if self._task is not None and self._task.version is not latest:
            self._task = replace(self._task, version=latest)

    def _follow(self) -> None:
        if self._program.module_hooks != module_hooks():
            self._program = replace(self._program, module_hooks=module_hooks())
        self._versions.follow(self._program)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        before = None if self._step is None else self._step.batch
        with sending("the batch", batch):
            # The user may write over what was read ahead while the batch before it is still being sent: so it is
            # copied.
            return SlicedBatch(batch, SendableBatch.of(copied(batch)) if ahead else SendableBatch.after(before, batch))

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, SlicedBatch)
        self._nodes.pump(Ignore(), 0.0)
        self._follow()
        self._step = StepStart(prepared.sendable, self._versions.latest, weights)

    def restart_step(self) -> None:
        self._follow()
        self._use_latest()

    def set_direction(self, direction: torch.Tensor) -> None:
        self._direction = self._published(to_bytes(direction).copy())

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        with sending("the function", task.function):
            packed = PackedBytes.of(pack(task, self._setup.parameters))
        sendable, before = None, self._versions.latest.packed.data
        if batch is not None:
            with sending("the batch", batch):
                sendable = SendableBatch.of(batch)
        self._nodes.pump(Ignore(), 0.0)
        if follow:
            self._follow()
            self._use_latest()
        offset = 0
        if batch is None:
            assert self._step is not None
            loaded = self._step.batch.batch
            offset = loaded.numbering.position(task.term or 0, range(1)).start
            batch = of_term(loaded, task.term)
        for kind in TASKS:
            self._paces[kind].clear()  # those of another function
        self._whole = task.whole
        self._task = TaskStart(packed, sendable, self._versions.latest, batch.numbering, batch.is_read, offset)
        return self._versions.latest.packed.data is not before

    def keep_outputs(self, keep: bool) -> None:
        self._keeps_outputs = keep

    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        found = [torch.empty((samples, *c.shape), dtype=c.dtype, device="cpu") for c in columns]
        for message in self._rows:
            rows = slice(message.start, message.stop)
            for whole, column, elements in zip(found, columns, message.columns, strict=True):
                whole[rows].copy_(from_bytes(elements, column.dtype, (rows.stop - rows.start, *column.shape)))
        return found

    def end_task(self) -> None:
        self._task, self._task_cut, self._rows = None, None, []

    def _target(self) -> Target:
        return Target(self._hooked, self._torch, self._step, self._cut, self._task, self._task_cut, self._keeps_outputs)

    def _published(self, elements: Any) -> Any:
        """The array itself if it is small, else a reference to where nodes can fetch it."""
        return self._ray.put(elements) if elements.nbytes > LARGE else elements

    def _publish_x(self) -> None:
        self._x = self._published(to_bytes(self._setup.flat.vector))

    def _give(
        self,
        node: ClusterNode,
        task: NodeTask,
        order: Order,
        runs: tuple[ChunkRun | None, ...],
        cells: Cells | None = None,
    ) -> None:
        """Send an assignment, with what the node lacks for it."""
        self._attempts += 1
        pending = PendingRequest(task, order.evaluation, self._attempts)
        assignment = Assignment(int(order.kind), pending.attempt, order.step, runs)
        state, target = node.state, self._target()
        batch, cut, offset, is_own = self._subject(order.kind)
        wanted = [
            range(offset + cut.bounds[run.first], offset + cut.bounds[run.last]) for run in runs if run is not None
        ]
        updates = state.updates(target)
        fill = [self._fill(state, target, batch, wanted, is_own)]
        if order.kind in TASKS and self._whole:
            assert self._step is not None
            loaded = self._step.batch
            fill.append(self._fill(state, target, loaded, [range(loaded.batch.size)], False))
        updates += [update for requests, _ in fill for update in requests]
        x = None if state.x is self._x else self._x
        direction = None if state.direction is self._direction else self._direction
        if self._cells is not None and cells is not None:
            residuals = self._cells.residuals_for(node, runs, cells)
            asked = request(NodeActor.evaluate, assignment, x, direction, cells, residuals)
        else:
            method = NodeActor.evaluate if task is NodeTask.EVALUATE else NodeActor.probe
            asked = request(method, assignment, x, direction)
        node.state = state.forgotten()  # if this is interrupted, nobody knows what the node has
        node.work(pending, updates, asked)
        state.updated(target)
        for _, held in fill:
            state.hold(*held)
        state.x, state.direction = self._x, self._direction
        node.state = state

    def _fill(
        self, state: NodeState, target: Target, batch: SendableBatch, wanted: Sequence[range], of_task: bool
    ) -> tuple[list[NodeRequest], tuple[list[range], bool]]:
        """What to send so that a node has these samples, and what it holds then."""
        missing, held = state.missing(target, batch, wanted, of_task)
        method = NodeActor.fill_task if of_task else NodeActor.fill
        with sending("the batch", *(part.inputs.data for part in batch.batch.parts)):
            slices = (list(batch.slices(samples)) for samples in missing)
            return [request(method, found) for found in slices if found], (held, of_task)

    def _subject(self, kind: Kind) -> tuple[SendableBatch, Cut, int, bool]:
        """The batch that orders of a kind are about, its cut, where in it their samples begin, and whether it is a
        task's own."""
        task, step = self._task, self._step
        if kind not in TASKS:
            assert step is not None
            return step.batch, self._cut, 0, False
        assert task is not None and self._task_cut is not None
        if task.batch is not None:
            return task.batch, self._task_cut, 0, True
        assert step is not None
        return step.batch, self._task_cut, task.offset, False

    # ---- evaluating

    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        self._nodes.pump(Ignore(), 0.0)
        return self._gathered(cut, orders, meanwhile).answers()

    def evaluate_compressed(
        self,
        cut: Cut,
        orders: Sequence[Order | None],
        taken: int,
        kept: int,
        meanwhile: Meanwhile | None = None,
    ) -> list[Answer]:
        assert self._cells is not None
        self._nodes.pump(Ignore(), 0.0)
        evaluation = next(order.evaluation for order in orders if order is not None)
        cells = self._cells.begin(evaluation, cut.chunks, taken, kept)
        cut = replace(cut, top=cells.level)
        gather = self._gathered(cut, self._cells.aligned(orders, cells), meanwhile, cells)
        return self._cells.finish(gather, cells, cut)

    def residuals(self, evaluation: int) -> dict[int, torch.Tensor]:
        assert self._cells is not None
        return self._cells.residuals_after(evaluation)

    def restore_residuals(self, evaluation: int, residuals: Mapping[int, torch.Tensor]) -> None:
        assert self._cells is not None
        self._cells.restore(evaluation, residuals)

    def _gathered(
        self,
        cut: Cut,
        orders: Sequence[Order | None],
        meanwhile: Meanwhile | None,
        cells: Cells | None = None,
    ) -> NodeGather:
        """The replies to the orders, once all chunks have come."""
        nodes = self._nodes
        self._torch = TorchSettings.current()
        kind = next(order.kind for order in orders if order is not None)
        if kind in TASKS:
            self._task_cut = cut
        else:
            self._cut = self._cut if self._cut == cut else cut
        batch, *_ = self._subject(kind)
        numbering = batch.batch.numbering if kind not in TASKS or self._task is None else self._task.numbering
        dtype, price = self._setup.flat.layout.sum_dtype, batch.bytes_a_sample / BANDWIDTH
        gather = NodeGather(nodes.ready, cut, orders, numbering, self._paces, dtype, price, cells)
        evaluation, scheduler = gather.order.evaluation, gather.scheduler
        self._publish_x()
        try:
            while scheduler.missing and not gather.failures:
                gather.present(nodes.ready)
                idle = [node.number for node in nodes.ready if not node.assignment(evaluation)]
                for command in scheduler.decide(idle, gather.estimate, time.monotonic()):
                    self._carry_out(command, gather)
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                somebody_waits = len(scheduler.busy) < len(nodes.by_number)
                late = scheduler.next_late(gather.estimate, time.monotonic()) if somebody_waits else math.inf
                nodes.pump(gather, late)
            if gather.failures:  # others may fail too: the same one should be raised each time
                self._pump_while_working(gather, evaluation, time.monotonic() + OTHERS)
        finally:
            self._call_off(evaluation)
        if gather.failures:
            raise gather.failures.first()
        self._rows = gather.rows
        return gather

    def _carry_out(self, command: Give | Ask, gather: NodeGather) -> None:
        node = self._nodes.by_number[command.node]
        if isinstance(command, Give):
            self._give(node, NodeTask.EVALUATE, gather.order, command.runs, gather.cells)
        else:
            assignment = node.assignment(gather.order.evaluation)
            assert assignment is not None
            node.ask(Question.RELEASE, assignment, ANSWERING)

    def _pump_while_working(self, listener: NodeListener, evaluation: int, until: float) -> None:
        while time.monotonic() < until and any(node.assignment(evaluation) for node in self._nodes.ready):
            self._nodes.pump(listener, until)

    def _call_off(self, evaluation: int) -> None:
        for node in self._nodes.ready:
            assignment = node.assignment(evaluation)
            if assignment is not None:
                node.ask(Question.CALL_OFF, assignment, ANSWERING)

    def probe(self, cut: Cut, order: Order) -> dict[int, float]:
        nodes, probe = self._nodes, NodeProbe(order.evaluation)
        nodes.pump(Ignore(), 0.0)
        self._torch = TorchSettings.current()
        self._cut = cut
        self._publish_x()
        for node in nodes.ready:
            run = ChunkRun(order.first, order.last)
            self._give(node, NodeTask.PROBE, order, (run, *(None for _ in node.ranks[1:])))
            probe.asked(node)
        try:
            probe.collect(lambda until: nodes.pump(probe, until))
        finally:
            self._call_off(order.evaluation)
        if probe.failures:
            raise probe.failures.first()
        return probe.seconds

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        with sending("the function or an argument", function, *arguments):
            message = dumps((function, arguments))
        nodes, calls = self._nodes, NodeCalls()
        nodes.pump(Ignore(), 0.0)
        while len(nodes.ready) < max(len(nodes.by_number), 1):  # those that are being replaced, too
            nodes.pump(Ignore(), math.inf)
        for node in nodes.ready:
            target = self._target()
            node.work(PendingRequest(NodeTask.RUN), node.state.updates(target), request(NodeActor.run, message))
            node.state.updated(target)
            calls.asked(node)
        return calls.collect(lambda until: nodes.pump(calls, until))

    def resize(self, workers: int) -> None:
        if self._cells is not None:
            self._cells.fetch_all()
        self._nodes.resize(workers)

    def room(self) -> int:
        return self._nodes.room()

    def stop(self) -> None:
        self._nodes.stop()

    def close(self) -> None:
        self._nodes.close()
