"""Collects the worker processes' replies to an evaluation, a speed probe, or a call of a function."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt.backends.gather import Failures, FunctionResults, SpeedProbe, unpickled
from batchopt.backends.ledger import Run
from batchopt.backends.process.channel import ProtocolError, Reply
from batchopt.backends.process.overdue import Overdue, Pace
from batchopt.backends.process.scheduler import Assign, Dispatch
from batchopt.backends.process.worker import Activity, Asked, Child, error_of
from batchopt.errors import PoisonChunkError
from batchopt_workers import faults
from batchopt_workers.failures import Failure
from batchopt_workers.messages import CHUNK, Cut, Kind, Order, Report
from batchopt_workers.numbering import Numbering
from batchopt_workers.tree import Node


class ProcessGather:
    """Collects the replies to one evaluation of a batch with this `numbering` of its samples.

    Of `paces` (seconds a sample, by rank) that of the kind of its orders is kept current. Replies to earlier evaluations
    are for `overdue`.
    """

    def __init__(
        self,
        cut: Cut,
        numbering: Numbering,
        orders: Sequence[Order | None],
        paces: Mapping[Kind, dict[int, float]],
        overdue: Overdue | None = None,
    ) -> None:
        some = next(order for order in orders if order is not None)
        self.cut = cut
        self.dispatch = Dispatch([None if o is None else Run(o.first, o.last) for o in orders], cut.chunks)
        self.failures = Failures()
        self.poison: PoisonChunkError | None = None
        self.gone: list[Child] = []
        self._order, self._evaluation = some, some.evaluation
        self._numbering, self._pace = numbering, paces[some.kind]
        self._overdue = Overdue(paces) if overdue is None else overdue
        self._orders: dict[Child, Order] = {}  # the last of each
        self._reports: dict[Child, Report] = {}
        self._spans: dict[tuple[Child, int], Span] = {}  # by order
        self._hooked: dict[int, tuple[Child, bytes]] = {}

    def order(self, child: Child, run: Assign) -> Order:
        """The message for the worker."""
        self._orders[child] = replace(self._order, first=run.first, last=run.last)
        return self._orders[child]

    def leave(self, living: Collection[Child]) -> dict[int, Pace]:
        """All is done, and nobody waits for those of the `living` who are still at something. Returns what that shows of
        their pace, by rank."""
        for child, order in self._orders.items():
            at_hand = self.dispatch.at_hand(child.rank)
            if at_hand is not None and child in living and not child.free:
                self._overdue.leave(child, order, self.cut, *at_hand)
        return self._overdue.take(self._order.kind, living)

    def held(self, child: Child) -> tuple[Node, ...]:
        """What the worker holds of this evaluation."""
        report = self._reports.get(child)
        return () if report is None else tuple(summary.node for summary in report.summaries)

    def estimate(self, worker: int, chunk: int) -> float | None:
        """The seconds that the chunk should take there, by its last work or else by that of the slowest."""
        pace = self._pace.get(worker, max(self._pace.values(), default=None))
        return None if pace is None else pace * (self.cut.bounds[chunk + 1] - self.cut.bounds[chunk])

    def heard(self, child: Child, asked: Asked, reply: Reply) -> None:
        """Raises `ProtocolError` for what cannot be true."""
        if asked.order is None or asked.order.evaluation != self._evaluation:
            self._overdue.heard(child, asked, reply)  # of an evaluation that nobody waits for
            return
        if reply.kind is Kind.FAILED:
            failure = Failure.decode(reply.body)
            error = error_of(child.rank, failure, None, self._numbering)
            self.failures.add(error, child.rank, failure.samples.start)
            self.dispatch.ended(child.rank)
        elif reply.kind is Kind.HOOKED:
            (chunk,) = CHUNK.unpack_from(reply.body)
            self._hooked.setdefault(chunk, (child, reply.body[CHUNK.size :]))
        elif reply.kind in (Kind.REPORT, Kind.DONE):
            self._reported(child, asked, reply)
        faults.point("parent.heard")

    def _reported(self, child: Child, asked: Asked, reply: Reply) -> None:
        assert asked.order is not None
        try:
            report = Report.decode(reply.body)
            self._check(child, report)
            self.dispatch.reported(child.rank, report.next, time.monotonic())
        except (ValueError, struct.error) as error:
            raise ProtocolError(str(error)) from error
        self._reports[child] = report
        span = Span(report.began, report.seconds, asked.order.first, report.next)
        self._spans[child, reply.number] = span
        samples = self._samples(span)
        if samples > 0:
            self._pace[child.rank] = report.seconds / samples
        if reply.kind is Kind.DONE:
            self.dispatch.ended(child.rank)

    def _samples(self, span: Span) -> int:
        return self.cut.bounds[span.last] - self.cut.bounds[span.first]

    def _check(self, child: Child, report: Report) -> None:
        if report.evaluation != self._evaluation:
            raise ValueError(f"a report of evaluation {report.evaluation} during {self._evaluation}")
        rows = 0 if child.rows is None else len(child.rows)
        for summary in report.summaries:
            if summary.row >= rows or summary.node.first_chunk >= self.cut.chunks:
                raise ValueError(f"a partial {summary.node} in row {summary.row} of {rows}")
            if len(summary.losses) != len(self._numbering.names):
                raise ValueError(f"{len(summary.losses)} losses of {len(self._numbering.names)} terms")

    def lost(self, child: Child, ending: str) -> None:
        """What it reported stands: the memory is ours too, and nobody else writes there."""
        self._overdue.lost(child, ending)
        self.gone.append(child)
        chunk = self.dispatch.lost(child.rank, child.death)
        if chunk is not None:
            samples = range(self.cut.bounds[chunk], self.cut.bounds[chunk + 1])
            terms, deaths = self._numbering.within(samples), self.dispatch.ledger.losses[chunk]
            self.poison = PoisonChunkError(chunk, samples, ending, terms, deaths)

    @property
    def has_reports(self) -> bool:
        """Whether anybody has evaluated a chunk."""
        return bool(self._reports)

    def answers(self) -> list[Answer]:
        """What each worker contributed, in rank order; partials of two workers may contain the same chunk. Nothing, if all
        was given up before it was done."""
        if not self._reports:
            return []
        found = []
        results: dict[Child, dict[int, list[Any]]] = {child: {} for child in self._reports}
        somebody = next(iter(results))
        for chunk, (child, body) in self._hooked.items():
            # one that died between the two had said what the hook returned, and another evaluated the chunk again
            results[child if child in results else somebody][chunk] = unpickled(child.rank, "posthook", body)
        spans: dict[Child, list[Span]] = {child: [] for child in self._reports}
        for (child, _), span in self._spans.items():
            spans[child].append(span)
        for child, report in sorted(self._reports.items(), key=lambda item: item[0].rank):
            assert child.rows is not None
            partials = []
            for summary in report.summaries:
                row = child.rows[summary.row]
                partials.append((summary.node, Partial(summary.losses, row.gradient, row.changes, summary.used)))
            samples, seconds = sum(map(self._samples, spans[child])), sum(span.seconds for span in spans[child])
            found.append(Answer(child.rank, samples, seconds, partials, results[child], spans[child], report.drew))
        return found


class ProcessProbe(SpeedProbe[Child]):
    """Collects how long each worker process needs for the same order."""

    def __init__(self, evaluation: int, numbering: Numbering) -> None:
        super().__init__(evaluation)
        self._numbering = numbering

    def heard(self, child: Child, asked: Asked, reply: Reply) -> None:
        """Done, or failed."""
        if asked.order is None or not self.is_awaited(child, asked.order.evaluation):
            return
        if reply.kind is Kind.FAILED:
            self.failed(child)
            self.failures.add(error_of(child.rank, Failure.decode(reply.body), None, self._numbering), child.rank)
        elif reply.kind is Kind.DONE:
            self.measured(child, {child.rank: Report.decode(reply.body).seconds})


class ProcessCalls(FunctionResults[Child]):
    """Collects what a function returns in every worker process."""

    def heard(self, child: Child, asked: Asked, reply: Reply) -> None:
        """A result or a failure of this call; any other is of an earlier one."""
        if not self.is_awaited(child) or asked.activity is not Activity.FUNCTION or not child.idle:
            return
        if reply.kind is Kind.FAILED:
            self.raised(child, child.rank, error_of(child.rank, Failure.decode(reply.body), Activity.FUNCTION))
        else:
            self.returned(child, {child.rank: reply.body})
