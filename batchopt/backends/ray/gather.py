"""Collects the nodes' replies to an evaluation, a speed probe, or a call of a function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt.backends.gather import Failures, FunctionResults, SpeedProbe, unpickled
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.messages import (
    AssignmentResult,
    Cells,
    NodeReply,
    NodeTask,
    ResidualName,
    ResidualsMessage,
    RowsMessage,
    Undone,
)
from batchopt.backends.ray.node import ClusterNode, NodeMessage, PendingRequest, Released
from batchopt.backends.ray.scheduler import NodeScheduler
from batchopt.backends.ray.transfer import Bytes, from_bytes
from batchopt.errors import PoisonChunkError
from batchopt_workers.forms import sums_layout
from batchopt_workers.messages import Cut, Kind, Order
from batchopt_workers.numbering import Numbering
from batchopt_workers.tree import Node


class NodeGather:
    """Collects the replies to one evaluation.

    Of `paces` (seconds a sample, by node) that of the kind of its orders is kept current. Gradients come in `dtype`,
    and it takes `price` seconds to send a sample. With `cells` some gradients come compressed.
    """

    def __init__(
        self,
        nodes: Sequence[ClusterNode],
        cut: Cut,
        orders: Sequence[Order | None],
        numbering: Numbering,
        paces: Mapping[Kind, dict[int, float]],
        dtype: torch.dtype,
        price: float = 0.0,
        cells: Cells | None = None,
    ) -> None:
        self.cells = cells
        self.compressed: dict[Node, int] = {}  # cells that came compressed, and the nodes that they are from
        self.order = next(order for order in orders if order is not None)
        self.failures = Failures()
        self._cut, self._numbering, self._pace, self._dtype = cut, numbering, paces[self.order.kind], dtype
        self._results: dict[int, tuple[ClusterNode, AssignmentResult, float]] = {}  # by the assignment's number
        self._known = {node.number for node in nodes}
        runs = [None if order is None else ChunkRun(order.first, order.last) for order in orders]
        placed = {rank for node in nodes for rank in node.ranks}
        others = [run for rank, run in enumerate(runs) if run is not None and rank not in placed]
        assignments = {node.number: [runs[rank] for rank in node.ranks] for node in nodes}
        self.scheduler = NodeScheduler(assignments, others, cut.chunks, price * cut.bounds[-1] / cut.chunks)

    def present(self, nodes: Sequence[ClusterNode]) -> None:
        """Let nodes that have joined since take part; `nodes` are all that can work."""
        for node in nodes:
            if node.number not in self._known:
                self._known.add(node.number)
                self.scheduler.joined(node.number, len(node.ranks))

    def estimate(self, node: int, runs: Sequence[ChunkRun]) -> float | None:
        """The seconds that the runs should take on the node, judged by its last work; None if it has done none."""
        pace = self._pace.get(node)
        return None if pace is None else pace * sum(map(self._samples, runs))

    def _samples(self, run: ChunkRun) -> int:
        return self._cut.bounds[run.last] - self._cut.bounds[run.first]

    def heard(self, node: ClusterNode, call: PendingRequest, reply: NodeMessage) -> None:
        """Take in an answer. One to another evaluation comes late, and one that was heard before came twice: neither
        counts."""
        if call.evaluation != self.order.evaluation:
            return
        if isinstance(reply, Released):
            self.scheduler.released(node.number, reply.runs)
        elif call.task is NodeTask.EVALUATE and isinstance(reply, NodeReply):
            self._answered(node, call, reply)

    def _answered(self, node: ClusterNode, call: PendingRequest, reply: NodeReply) -> None:
        if reply.failure is not None:
            self.scheduler.answered(node.number, [])
            if not reply.failure.is_a(Undone):
                add(self.failures, node.error(reply.failure, NodeTask.EVALUATE))
            return
        found: AssignmentResult = reply.value
        if found.attempt != call.attempt or found.attempt in self._results:
            return
        self._results[found.attempt] = node, found, call.since
        merged = [Node(s.level, s.position) for s in found.sums]
        done = [ChunkRun(run.first_chunk, run.first_chunk + run.chunks(self._cut.chunks)) for run in merged]
        samples = sum(map(self._samples, done))
        if samples:
            self._pace[node.number] = found.seconds / samples
        self.scheduler.answered(node.number, done)

    def lost(self, node: ClusterNode, ending: str) -> None:
        """Give up what the node had not answered; what it had answered stands."""
        self._pace.pop(node.number, None)
        chunk = self.scheduler.lost(node.number)
        if chunk is not None:
            samples = range(self._cut.bounds[chunk], self._cut.bounds[chunk + 1])
            add(self.failures, PoisonChunkError(chunk, samples, ending, self._numbering.within(samples)))

    def answers(self) -> list[Answer]:
        """What each worker contributed, in rank order; the merged partials of a node go with its first worker."""
        will_be_written = self.cells is not None or sum(len(found.sums) for _, found, _ in self._results.values()) > 2
        merged: list[Answer] = []
        all_forms = {
            attempt: unpickled(node.ranks[0], "the function", found.forms) if found.forms else {}
            for attempt, (node, found, _) in self._results.items()
        }
        if self.order.kind is Kind.TOTAL:
            form = next(form for forms in all_forms.values() for form in forms.values())
            self._dtype = sums_layout(form.columns).sum_dtype
        self.compressed = {
            Node(s.level, s.position): node.number
            for node, found, _ in self._results.values()
            for s in found.sums
            if s.is_compressed
        }
        for node, found, asked in self._results.values():
            began = asked - time.monotonic() + time.perf_counter()
            partials = list(self._partials(found, will_be_written))
            for i, work in enumerate(found.work):
                spans = [Span(began + at, seconds, first, last) for at, seconds, first, last in work.spans]
                rank = node.ranks[work.worker]
                results = unpickled(rank, "posthook", work.results) if work.results else {}
                mine, forms = (partials, all_forms[found.attempt]) if i == 0 else ([], {})
                merged.append(Answer(rank, work.samples, work.seconds, mine, results, spans, work.drew, forms))
        return sorted(merged, key=lambda answer: answer.rank)

    @property
    def rows(self) -> list[RowsMessage]:
        """What was collected."""
        return [message for _, found, _ in self._results.values() for message in found.rows]

    def _partials(self, found: AssignmentResult, copied: bool) -> Iterator[tuple[Node, Partial]]:
        """The partials of a result; copied where the parent will sum in them, since what came over the network is
        read-only. A cell that came compressed, too, is left out."""
        for s in found.sums:
            place = Node(s.level, s.position)
            if s.is_compressed:
                gradient = self._decoded(s.gradient)
            elif place in self.compressed:
                continue
            else:
                gradient = from_bytes(s.gradient, self._dtype, (-1,))
                gradient = gradient.clone() if copied else gradient
            changes = from_bytes(s.changes, torch.float64, (-1,)).clone()
            yield place, Partial(s.losses, gradient, changes, s.used)

    def _decoded(self, code: Bytes) -> torch.Tensor:
        assert self.cells is not None
        return self.cells.decode(from_bytes(code, self.cells.compression.code_dtype, (-1,)), self._dtype)


class NodeResiduals:
    """Collects what compression has left on nodes: `found`, without what is lost with a node."""

    def __init__(self) -> None:
        self.found: dict[ResidualName, Bytes] = {}
        self._waiting: dict[ClusterNode, set[ResidualName]] = {}

    def asked(self, node: ClusterNode, names: Collection[ResidualName]) -> None:
        """The node was asked for these."""
        self._waiting[node] = set(names)

    def heard(self, node: ClusterNode, asked: object, reply: NodeMessage) -> None:
        """Take in what the node has; it may have been asked before."""
        if isinstance(reply, ResidualsMessage):
            self.found |= {name: residual for name, residual in reply.found.items() if residual is not None}
            if node in self._waiting and not self._waiting[node] - reply.found.keys():
                del self._waiting[node]

    def lost(self, node: ClusterNode, ending: str) -> None:
        """Expect nothing from the node."""
        self._waiting.pop(node, None)

    def collect(self, pump: Callable[[], None]) -> None:
        """Pump until all have answered."""
        while self._waiting:
            pump()


class NodeProbe(SpeedProbe[ClusterNode]):
    """Collects how long each worker of each node needs for the same run."""

    def heard(self, node: ClusterNode, call: PendingRequest, reply: NodeMessage) -> None:
        """Take in the measurements of a node, or a failure."""
        if (
            call.task is not NodeTask.PROBE
            or not isinstance(reply, NodeReply)
            or not self.is_awaited(node, call.evaluation)
        ):
            return
        if reply.failure is None:
            self.measured(node, {node.ranks[worker]: seconds for worker, seconds in reply.value.items()})
            return
        self.failed(node)
        if not reply.failure.is_a(Undone):
            add(self.failures, node.error(reply.failure, NodeTask.PROBE))


class NodeCalls(FunctionResults[ClusterNode]):
    """Collects what a function returns in every worker of every node."""

    def heard(self, node: ClusterNode, call: PendingRequest, reply: NodeMessage) -> None:
        """Take in the results of a node, or a failure."""
        if call.task is not NodeTask.RUN or not isinstance(reply, NodeReply) or not self.is_awaited(node):
            return
        if reply.failure is None:
            self.returned(node, dict(zip(node.ranks, reply.value, strict=True)))
        elif reply.failure.is_a(Undone):
            self.lost(node, reply.failure.text.message)
        else:
            error = node.error(reply.failure, NodeTask.RUN)
            self.raised(node, getattr(error, "rank", node.ranks[0]), error)


def add(failures: Failures, error: BaseException) -> None:
    """Note an exception with its own rank and samples."""
    samples = getattr(error, "samples", None)
    failures.add(error, getattr(error, "rank", 0), samples.start if samples else math.inf)
