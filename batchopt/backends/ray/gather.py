"""Collects the nodes' replies to an evaluation, a speed probe, or a call of a function."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt.backends.gather import Failures, FunctionResults, SpeedProbe, unpickled
from batchopt.backends.ledger import Run
from batchopt.backends.ray.messages import Reply, Task, Undone, Yield
from batchopt.backends.ray.node import Call, Heard, Machine, Released
from batchopt.backends.ray.scheduler import Handout
from batchopt.backends.ray.transfer import from_bytes
from batchopt.errors import PoisonChunkError
from batchopt_workers.messages import Cut, Kind, Order
from batchopt_workers.numbering import Numbering
from batchopt_workers.tree import Node


class NodeGather:
    """Collects the replies to one evaluation. Of `paces` (seconds a sample, by machine) that of the kind of its
    orders is kept current. Gradients come in `dtype`. It takes `price` seconds to send a sample."""

    def __init__(
        self,
        machines: Sequence[Machine],
        cut: Cut,
        orders: Sequence[Order | None],
        numbering: Numbering,
        paces: Mapping[Kind, dict[int, float]],
        dtype: torch.dtype,
        price: float = 0.0,
    ) -> None:
        self.order = next(order for order in orders if order is not None)
        self.failures = Failures()
        self._cut, self._numbering, self._pace, self._dtype = cut, numbering, paces[self.order.kind], dtype
        self._yields: dict[int, tuple[Machine, Yield, float]] = {}  # by the share's number
        self._known = {machine.number for machine in machines}
        runs = [None if order is None else Run(order.first, order.last) for order in orders]
        placed = {rank for machine in machines for rank in machine.ranks}
        others = [run for rank, run in enumerate(runs) if run is not None and rank not in placed]
        shares = {machine.number: [runs[rank] for rank in machine.ranks] for machine in machines}
        self.handout = Handout(shares, others, cut.chunks, price * cut.bounds[-1] / cut.chunks)

    def present(self, machines: Sequence[Machine]) -> None:
        """These can work: some may have joined."""
        for machine in machines:
            if machine.number not in self._known:
                self._known.add(machine.number)
                self.handout.joined(machine.number, len(machine.ranks))

    def estimate(self, machine: int, runs: Sequence[Run]) -> float | None:
        """The seconds that the runs should take there, by its last work."""
        pace = self._pace.get(machine)
        return None if pace is None else pace * sum(map(self._samples, runs))

    def _samples(self, run: Run) -> int:
        return self._cut.bounds[run.last] - self._cut.bounds[run.first]

    def heard(self, machine: Machine, call: Call, reply: Heard) -> None:
        """An answer; one of another evaluation is late, one that was heard before is said twice: neither counts."""
        if call.evaluation != self.order.evaluation:
            return
        if isinstance(reply, Released):
            self.handout.released(machine.number, reply.runs)
        elif call.task is Task.EVALUATE:
            self._answered(machine, call, reply)

    def _answered(self, machine: Machine, call: Call, reply: Reply) -> None:
        if reply.failed is not None:
            self.handout.answered(machine.number, [])
            if not reply.failed.is_a(Undone):
                add(self.failures, machine.error(reply.failed, Task.EVALUATE))
            return
        found: Yield = reply.value
        if found.attempt != call.attempt or found.attempt in self._yields:
            return
        self._yields[found.attempt] = machine, found, call.since
        nodes = [Node(s.level, s.position) for s in found.sums]
        done = [Run(node.first_chunk, node.first_chunk + node.chunks(self._cut.chunks)) for node in nodes]
        samples = sum(map(self._samples, done))
        if samples:
            self._pace[machine.number] = found.seconds / samples
        self.handout.answered(machine.number, done)

    def lost(self, machine: Machine, ending: str) -> None:
        """The machine is gone; what it has answered stands."""
        self._pace.pop(machine.number, None)
        chunk = self.handout.lost(machine.number)
        if chunk is not None:
            samples = range(self._cut.bounds[chunk], self._cut.bounds[chunk + 1])
            add(self.failures, PoisonChunkError(chunk, samples, ending, self._numbering.within(samples)))

    def answers(self) -> list[Answer]:
        """What each worker contributed, in rank order; the merged partials of a machine are with its first worker's."""
        will_be_written = sum(len(found.sums) for _, found, _ in self._yields.values()) > 2
        merged: list[Answer] = []
        for machine, found, asked in self._yields.values():
            began = asked - time.monotonic() + time.perf_counter()
            partials = list(self._partials(found, will_be_written))
            for i, work in enumerate(found.work):
                spans = [Span(began + at, seconds, first, last) for at, seconds, first, last in work.spans]
                rank = machine.ranks[work.worker]
                results = unpickled(rank, "posthook", work.results) if work.results else {}
                merged.append(Answer(rank, work.samples, work.seconds, partials if i == 0 else [], results, spans))
        return sorted(merged, key=lambda answer: answer.rank)

    def _partials(self, found: Yield, copied: bool) -> Iterator[tuple[Node, Partial]]:
        """What came over the network cannot be written, which the parent does where there are more than two to sum."""
        for s in found.sums:
            gradient = from_bytes(s.gradient, self._dtype, (-1,))
            changes = from_bytes(s.changes, torch.float64, (-1,)).clone()
            yield (
                Node(s.level, s.position),
                Partial(s.losses, gradient.clone() if copied else gradient, changes, s.used),
            )


class NodeProbe(SpeedProbe[Machine]):
    """Collects how long each worker of each node needs for the same run."""

    def heard(self, machine: Machine, call: Call, reply: Heard) -> None:
        """Done, or failed."""
        if call.task is not Task.PROBE or not isinstance(reply, Reply) or not self.is_awaited(machine, call.evaluation):
            return
        if reply.failed is None:
            self.measured(machine, {machine.ranks[worker]: seconds for worker, seconds in reply.value.items()})
            return
        self.failed(machine)
        if not reply.failed.is_a(Undone):
            add(self.failures, machine.error(reply.failed, Task.PROBE))


class NodeCalls(FunctionResults[Machine]):
    """Collects what a function returns in every worker of every node."""

    def heard(self, machine: Machine, call: Call, reply: Heard) -> None:
        """A result or a failure."""
        if call.task is not Task.RUN or not isinstance(reply, Reply) or not self.is_awaited(machine):
            return
        if reply.failed is None:
            self.returned(machine, dict(zip(machine.ranks, reply.value, strict=True)))
        elif reply.failed.is_a(Undone):
            self.lost(machine, reply.failed.text.message)
        else:
            error = machine.error(reply.failed, Task.RUN)
            self.raised(machine, getattr(error, "rank", machine.ranks[0]), error)


def add(failures: Failures, error: BaseException) -> None:
    """Note an exception that was made again here, which knows where it was raised."""
    samples = getattr(error, "samples", None)
    failures.add(error, getattr(error, "rank", 0), samples.start if samples else math.inf)
