"""One evaluation by machines, as far as it has come; one measurement of each worker; one call in each."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt.backends.process.gather import SLOWEST
from batchopt.backends.process.scheduler import Run
from batchopt.backends.ray.messages import Reply, Task, Undone, Yield
from batchopt.backends.ray.node import Call, Machine
from batchopt.backends.ray.nodes import Nobody
from batchopt.backends.ray.scheduler import Handout
from batchopt.backends.ray.transfer import from_bytes
from batchopt.errors import PoisonChunkError
from batchopt_workers.messages import Cut, Kind, Order
from batchopt_workers.numbering import Numbering
from batchopt_workers.tree import Node


class Harvest:
    """Takes in what machines say of one evaluation. Of `paces` (seconds a sample, by machine) that of the kind of its
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
        self.failures: list[BaseException] = []
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

    def heard(self, machine: Machine, call: Call, reply: Reply) -> None:
        """An answer; one of another evaluation is late, one that was heard before is said twice: neither counts."""
        if call.task is not Task.EVALUATE or call.evaluation != self.order.evaluation:
            return
        if reply.failed is not None:
            self.handout.answered(machine.number, [])
            if not reply.failed.is_a(Undone):
                self.failures.append(machine.error(reply.failed, Task.EVALUATE))
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

    def released(self, machine: Machine, call: Call, given: list[Run]) -> None:
        """The machine gave up these runs of its share."""
        if call.evaluation == self.order.evaluation:
            self.handout.released(machine.number, given)

    def lost(self, machine: Machine, ending: str) -> None:
        """The machine is gone; what it has answered stands."""
        self._pace.pop(machine.number, None)
        chunk = self.handout.lost(machine.number)
        if chunk is not None:
            samples = range(self._cut.bounds[chunk], self._cut.bounds[chunk + 1])
            self.failures.append(PoisonChunkError(chunk, samples, ending, self._numbering.within(samples)))

    def first_failure(self) -> BaseException:
        """The one to be raised: that of the first samples."""

        def place(error: BaseException) -> tuple[float, float]:
            samples = getattr(error, "samples", None)
            return samples.start if samples else math.inf, getattr(error, "rank", math.inf)

        return min(self.failures, key=place)

    def answers(self) -> list[Answer]:
        """What each worker contributed, in rank order; the merged partials of a machine are with its first worker's."""
        will_be_written = sum(len(found.sums) for _, found, _ in self._yields.values()) > 2
        merged: list[Answer] = []
        for machine, found, asked in self._yields.values():
            began = asked - time.monotonic() + time.perf_counter()
            partials = list(self._partials(found, will_be_written))
            for i, work in enumerate(found.work):
                spans = [Span(began + at, seconds, first, last) for at, seconds, first, last in work.spans]
                results = pickle.loads(work.results) if work.results else {}
                rank = machine.ranks[work.worker]
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


class Probe(Nobody):
    """Takes in how long each worker needs for the same run, and does not wait long for those that are much slower."""

    def __init__(self, evaluation: int) -> None:
        self.seconds: dict[int, float] = {}
        self.failures: list[BaseException] = []
        self.patience = math.inf
        self._evaluation = evaluation

    def heard(self, machine: Machine, call: Call, reply: Reply) -> None:
        """Done, or failed."""
        if call.task is not Task.PROBE or call.evaluation != self._evaluation:
            return
        if reply.failed is not None:
            if not reply.failed.is_a(Undone):
                self.failures.append(machine.error(reply.failed, Task.PROBE))
            return
        self.seconds.update({machine.ranks[worker]: seconds for worker, seconds in reply.value.items()})
        self.patience = time.monotonic() + SLOWEST * max(self.seconds.values(), default=0.0) + 1.0


class Calls(Nobody):
    """Waits for the results of a function in every worker."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}
        self.failures: list[BaseException] = []
        self.gone = ""

    def heard(self, machine: Machine, call: Call, reply: Reply) -> None:
        """A result or a failure."""
        if call.task is not Task.RUN:
            return
        if reply.failed is not None and reply.failed.is_a(Undone):
            self.gone = str(reply.failed.arguments[0])
        elif reply.failed is not None:
            self.failures.append(machine.error(reply.failed, Task.RUN))
        else:
            self.results.update(zip(machine.ranks, reply.value, strict=True))

    def lost(self, machine: Machine, ending: str) -> None:
        """The machine will not answer."""
        self.gone = ending

    def values(self) -> list[Any]:
        """The results in rank order; raises the first failure."""
        if self.failures:
            raise min(self.failures, key=lambda error: getattr(error, "rank", math.inf))
        return [pickle.loads(body) for _, body in sorted(self.results.items())]
