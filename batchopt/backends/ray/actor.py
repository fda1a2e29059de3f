"""What an actor on a node does: it has the node's workers, and speaks for them.

    parent                                  ║ network     this node
    ClusterNode.work(assignment, X)       ──╫──►  NodeActor ── NodeWorkers ── worker processes
                                            ║             X, batch and partials in shared memory
    merged partials  ◄──────────────────────╫───  NodeActor

X arrives once, whatever the number of workers, and their partials leave merged. Nothing here knows what carries the
messages: this is an object with methods, whose arguments and results are numbers, bytes and arrays.
"""

from __future__ import annotations

import concurrent.futures
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

import torch

from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.reduce import merge_answers
from batchopt._mapreduce.results import forms_of
from batchopt._program.flatten import Flat
from batchopt.backends.base import Setup, WorkerInfo
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.messages import (
    Assignment,
    AssignmentResult,
    Cells,
    Envelope,
    NodeFailure,
    NodeReply,
    NodeRequest,
    NodeSetup,
    OutOfStep,
    Question,
    ResidualName,
    ResidualsMessage,
    RowsMessage,
    WorkerStatus,
    WorkerTimes,
)
from batchopt.backends.ray.node_workers import NodeWorkers
from batchopt.backends.ray.program_versions import ProgramUpdate, made, received
from batchopt.backends.ray.residuals import ResidualStore
from batchopt.backends.ray.transfer import (
    BatchBuffer,
    BatchManifest,
    BatchSlice,
    Bytes,
    PackedBytes,
    from_bytes,
    to_bytes,
)
from batchopt.errors import BatchoptError
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.evaluate import Program
from batchopt_workers.forms import Form
from batchopt_workers.layout import Layout
from batchopt_workers.memory import SharedBlock
from batchopt_workers.messages import TASKS, Cut, Kind, Order
from batchopt_workers.numbering import Numbering
from batchopt_workers.packing import assemble, dumps
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.tree import Node
from batchopt_workers.versions import versions

P = ParamSpec("P")


@dataclass
class _Node:
    """What there is once the workers have started: X, the program's tensors with their digests, and the workers."""

    layout: Layout
    vector: torch.Tensor
    parameters: list[torch.nn.Parameter]
    tensors: list[torch.Tensor]
    digests: tuple[bytes, ...]
    workers: NodeWorkers


class NodeActor:
    """A node's workers, as the parent asks for them. One thread does what is asked (`work`, and the methods that it
    names), another one may interrupt it (`ask`)."""

    def __init__(self) -> None:
        self._started: _Node | None = None
        self._next = 0, 0  # epoch and position of the next request
        self._cut = self._task_cut = Cut((0,))
        self._buffer: BatchBuffer | None = None
        self._task_buffer: BatchBuffer | None = None
        self._residuals = ResidualStore()

    def handshake(self) -> tuple[str, str]:
        """The versions, which have to be the parent's, and this node's name."""
        return versions(), socket.gethostname()

    def work(self, envelope: Envelope, *arguments: Any) -> NodeReply:
        """Take in the updates, then do the task with these arguments. Never raises.

        What is large comes by reference, and Ray resolves references only among the arguments of the call itself.
        """
        value, failure = None, None
        try:
            self._keep_step(envelope.epoch, envelope.position)
            self._take_in(envelope)
            value = getattr(NodeActor, envelope.method)(self, *arguments)
        except BaseException as error:
            failure = NodeFailure.of(error)
        infos = [] if self._started is None else self._started.workers.group.infos
        return NodeReply(value, failure, [_status(info) for info in infos])

    def _take_in(self, envelope: Envelope) -> None:
        """The updates. Where one fails, what was sent meanwhile and builds on them is `OutOfStep`."""
        try:
            for method, values in envelope.updates:
                getattr(NodeActor, method)(self, *values)
        except BaseException:
            self._next = envelope.epoch, -1
            raise

    def _keep_step(self, epoch: int, position: int) -> None:
        """Raise `OutOfStep` unless the request before this one has come."""
        begins = epoch > self._next[0] and position == 0
        if not begins and (epoch, position) != self._next:
            raise OutOfStep(f"request {epoch}.{position} came where {self._next[0]}.{self._next[1]} was to come")
        self._next = epoch, position + 1

    def ask(self, question: Question, attempt: int, seconds: float) -> list[ChunkRun] | None:
        """As `NodeWorkers.ask`; None if there was no answer in time."""
        try:
            return [] if self._started is None else self._started.workers.ask(question, attempt, seconds)
        except concurrent.futures.TimeoutError:  # another class than Python's own before 3.11
            return None

    # ---- what a request names

    @property
    def _node(self) -> _Node:
        if self._started is None:
            raise BatchoptError("the workers of this node were not started")
        return self._started

    def start(self, node_setup: NodeSetup, program: PackedBytes) -> None:
        """Start the workers of a packed program."""
        node_setup.torch.apply()
        layout = node_setup.layout
        block = SharedBlock.create(layout.size * layout.dtype.itemsize)
        vector = block.tensor(layout.dtype, (layout.size,))
        parameters = [torch.nn.Parameter(view) for view in layout.views(vector)]
        tensors = [made(*place) for place in zip(program.placements, program.tensors, strict=True)]
        loaded: Program = assemble(program.data, tensors, parameters)
        setup = Setup(
            workers=len(node_setup.ranks),
            fixed_bits=node_setup.fixed_bits,
            timeout=node_setup.timeout,
            restarts=node_setup.restarts,
            threads=node_setup.threads,
            devices=node_setup.devices,
            precode=pickle.loads(node_setup.precode),
            program=loaded,
            flat=Flat(layout, vector, block),
            parameters=parameters,
            buffers=StepBuffers(loaded.module, state=loaded.state),
            ranks=node_setup.ranks,
            world=node_setup.world,
        )
        workers = NodeWorkers(setup, node_setup.torch)
        self._started = _Node(layout, vector, parameters, tensors, node_setup.digests, workers)

    def use_hooks(self, hooked: bool) -> None:
        """Whether hooks run from now on."""
        self._node.workers.group.use_hooks(hooked)

    def set_torch(self, settings: TorchSettings) -> None:
        """Compute with these settings of torch."""
        settings.apply()
        self._node.workers.torch = settings

    def update(self, found: ProgramUpdate) -> None:
        """Take another version of the program, for the step that begins next or goes on."""
        node = self._node
        tensors = received(found, node.tensors, node.digests)
        if found.data is not None:
            loaded: Program = assemble(found.data, tensors, node.parameters)
            node.workers.replace_program(loaded, StepBuffers(loaded.module, state=loaded.state))
        node.tensors, node.digests = tensors, found.digests

    def load(self, manifest: BatchManifest | None, weights: tuple[float, ...]) -> None:
        """Begin a step on a batch whose samples come with `fill`; None: on the batch of the step before, with its
        samples."""
        if manifest is None:
            self._node.workers.reopen(weights)
        else:
            workers = self._node.workers
            self._buffer = BatchBuffer(manifest, self._buffer if workers.group.is_free else None)
            workers.open(self._buffer, weights)

    def fill(self, slices: Sequence[BatchSlice]) -> None:
        """Add samples to the batch."""
        assert self._buffer is not None
        for part in slices:
            self._buffer.fill(part)
            self._node.workers.fill(part)

    def keep_outputs(self, keep: bool) -> None:
        """Whether evaluations return what the module does."""
        self._node.workers.group.results.keep_outputs(keep)

    def begin_task(
        self, task: PackedBytes, manifest: BatchManifest | None, numbering: Numbering, reading: bool
    ) -> None:
        """Let assignments of tasks be about this one: on the loaded batch, or on one whose samples come with
        `fill_task`."""
        self._task_buffer = None if manifest is None else BatchBuffer(manifest)
        self._node.workers.begin_task(task, self._task_buffer, numbering, reading)

    def fill_task(self, slices: Sequence[BatchSlice]) -> None:
        """Add samples to the task's batch."""
        assert self._task_buffer is not None
        for part in slices:
            self._task_buffer.fill(part)
            self._node.workers.fill_task(part)

    def set_task_cut(self, bounds: Sequence[int]) -> None:
        """Cut the task's batch so."""
        self._task_cut = Cut(tuple(bounds))

    def end_task(self) -> None:
        """Hold nothing of the task any more."""
        self._task_buffer = None
        self._node.workers.end_task()

    def set_cut(self, cut: Cut) -> None:
        """Cut the batch so."""
        self._cut = cut

    def resize(self, workers: int, world: int) -> None:
        """Keep so many workers, of `world` on all nodes."""
        self._node.workers.keep(workers, world)

    def evaluate(
        self,
        assignment: Assignment,
        x: Bytes | None,
        direction: Bytes | None,
        cells: Cells | None = None,
        residuals: Mapping[int, Bytes] = MappingProxyType({}),
    ) -> AssignmentResult:
        """Evaluate an assignment, with another X and direction if these are given; its partials come merged. With
        `cells` those are compressed; `residuals` are of cells whose residual was not on this node."""
        began = time.perf_counter()
        self._set(x, direction)
        head = assignment.attempt, assignment.step
        orders = [None if run is None else Order(*head, *run, Kind(assignment.kind)) for run in assignment.runs]
        workers, is_task = self._node.workers, assignment.kind in TASKS
        cut = self._task_cut if is_task else self._cut
        workers.begin(assignment.attempt)
        try:
            answers = workers.evaluate(cut, orders, is_task)
        finally:
            workers.end()
        if cells is not None:
            self._residuals.begin(cells, residuals, self._node.layout.sum_dtype)
        sums = [self._residuals.message(*merged, cells) for merged in merge_answers(answers, cut.chunks, cut.top)]
        times = [_times(answer, began) for answer in answers]
        found = AssignmentResult(assignment.attempt, sums, times, time.perf_counter() - began)
        forms = forms_of(answers)
        return self._with_results(found, forms, cut, assignment.kind) if forms else found

    def residuals(self, names: Sequence[ResidualName]) -> ResidualsMessage:
        """What compression has left under these names; may be called while something is evaluated."""
        return self._residuals.of(names)

    def _with_results(
        self, found: AssignmentResult, forms: Mapping[int, Form], cut: Cut, kind: int
    ) -> AssignmentResult:
        """The same with what a function, or the module, returned for the chunks that were done."""
        columns = next((form.columns for form in forms.values() if form.columns), ())
        rows = []
        if columns and kind != Kind.TOTAL:
            whole = self._node.workers.group.collected(columns, cut.bounds[-1])
            for place in (Node(sum_.level, sum_.position) for sum_ in found.sums):
                first = place.first_chunk
                samples = slice(cut.bounds[first], cut.bounds[first + place.chunks(cut.chunks)])
                rows.append(RowsMessage(samples.start, samples.stop, [to_bytes(tensor[samples]) for tensor in whole]))
        return found._replace(rows=rows, forms=dumps(forms))

    def _set(self, x: Bytes | None, direction: Bytes | None) -> None:
        vector = self._node.vector
        if x is not None:
            with torch.no_grad():
                vector.copy_(from_bytes(x, vector.dtype, vector.shape))
        if direction is not None:
            self._node.workers.group.set_direction(from_bytes(direction, vector.dtype, vector.shape))

    def probe(self, assignment: Assignment, x: Bytes | None, direction: Bytes | None) -> dict[int, float]:
        """The seconds that each worker needs for the first run of an assignment."""
        self._set(x, direction)
        run = assignment.runs[0]
        assert run is not None
        order = Order(assignment.attempt, assignment.step, *run, Kind(assignment.kind))
        workers = self._node.workers
        workers.begin(assignment.attempt)
        try:
            return workers.group.probe(self._cut, order)
        finally:
            workers.end()

    def run(self, function: bytes) -> list[bytes]:
        """Call a pickled function with pickled arguments in each worker; the results pickled."""
        called, arguments = pickle.loads(function)
        return [dumps(value) for value in self._node.workers.group.run(called, arguments)]

    def close(self) -> None:
        """End the workers."""
        if self._started is not None:
            self._started.workers.close()


def _status(info: WorkerInfo) -> WorkerStatus:
    return WorkerStatus(info.pid, str(info.device), info.restarts, info.alive, info.lost)


def _times(answer: Answer, began: float) -> WorkerTimes:
    spans = [(span.began - began, *span[1:]) for span in answer.spans]
    results = dumps(answer.results) if answer.results else b""
    return WorkerTimes(answer.rank, answer.samples, answer.seconds, spans, results, answer.drew)


def request(method: Callable[Concatenate[NodeActor, P], Any], *arguments: P.args, **keywords: P.kwargs) -> NodeRequest:
    """A call of a method of `NodeActor`. An argument of a task may be a reference to it."""
    assert not keywords  # which the message has no place for
    return NodeRequest(method.__name__, arguments)
