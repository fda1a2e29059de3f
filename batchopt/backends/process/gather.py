"""One evaluation by worker processes, as far as it has come; one measurement of each of them; one call in each."""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt.backends.process.channel import ProtocolError, Reply
from batchopt.backends.process.overdue import Overdue, Pace
from batchopt.backends.process.scheduler import Assign, Dispatch, Run
from batchopt.backends.process.worker import Activity, Asked, Child
from batchopt.errors import WorkerError
from batchopt_workers import faults
from batchopt_workers.messages import CHUNK, Cut, Failure, Kind, Order, Report, message_of
from batchopt_workers.tree import Node

# A worker that needs this many times as long in a probe as the slowest so far, and a second more, is not waited for.
SLOWEST = 10.0


def unpickled(rank: int, what: str, body: bytes) -> Any:
    """What the user's function returned in a worker. Raises `WorkerError` if it cannot be made again here."""
    try:
        return pickle.loads(body)
    except Exception as error:
        message = f"{message_of(error)} (raised here, where what {what} returned is unpickled: return tensors, numbers and text)"
        raise WorkerError(rank, type(error).__name__, message, range(0)) from error


class Round:
    """Takes in what workers say of one evaluation of so many `terms`. Of `paces` (seconds a sample, by rank) that of
    the kind of its orders is kept current. What they say of others is for `overdue`."""

    def __init__(
        self,
        cut: Cut,
        terms: int,
        orders: Sequence[Order | None],
        paces: Mapping[Kind, dict[int, float]],
        overdue: Overdue | None = None,
    ) -> None:
        some = next(order for order in orders if order is not None)
        self.cut = cut
        self.dispatch = Dispatch([None if o is None else Run(o.first, o.last) for o in orders], cut.chunks)
        self.failures: list[tuple[int, Failure]] = []
        self.poison: tuple[int, range] | None = None
        self.gone: list[Child] = []
        self._order, self._evaluation = some, some.evaluation
        self._terms, self._pace = terms, paces[some.kind]
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
            self.failures.append((child.rank, Failure.decode(reply.body)))
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
            if len(summary.losses) != self._terms:
                raise ValueError(f"{len(summary.losses)} losses of {self._terms} terms")

    def lost(self, child: Child) -> None:
        """What it reported stands: the memory is ours too, and nobody else writes there."""
        self._overdue.lost(child)
        self.gone.append(child)
        chunk = self.dispatch.lost(child.rank, child.death)
        if chunk is not None:
            self.poison = chunk, range(self.cut.bounds[chunk], self.cut.bounds[chunk + 1])

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
            found.append(Answer(child.rank, samples, seconds, partials, results[child], spans[child]))
        return found


class Probe:
    """Takes in how long each worker needs for the same order, and does not wait long for those that are much slower."""

    def __init__(self, evaluation: int) -> None:
        self.seconds: dict[int, float] = {}
        self.failures: list[tuple[int, Failure]] = []
        self.gone: list[Child] = []
        self.waiting: set[Child] = set()
        self.patience = float("inf")
        self._evaluation = evaluation

    def asked(self, child: Child) -> None:
        """The worker was given the order."""
        self.waiting.add(child)

    def heard(self, child: Child, asked: Asked, reply: Reply) -> None:
        """Done, or failed."""
        if child not in self.waiting or asked.order is None or asked.order.evaluation != self._evaluation:
            return
        if reply.kind is Kind.FAILED:
            self.failures.append((child.rank, Failure.decode(reply.body)))
        elif reply.kind is Kind.DONE:
            self.seconds[child.rank] = Report.decode(reply.body).seconds
            slowest = max(self.seconds.values())
            self.patience = time.monotonic() + SLOWEST * slowest + 1.0
        else:
            return
        self.waiting.discard(child)

    def lost(self, child: Child) -> None:
        """It will not answer."""
        self.waiting.discard(child)
        self.gone.append(child)


class Calls:
    """Waits for the results of a function in every worker."""

    def __init__(self) -> None:
        self.waiting: dict[Child, int] = {}
        self.results: dict[int, bytes] = {}
        self.failures: list[tuple[int, Failure]] = []
        self.gone: Child | None = None

    def heard(self, child: Child, asked: Asked, reply: Reply) -> None:
        """A result or a failure of this call; any other is of an earlier one."""
        if child not in self.waiting or asked.activity is not Activity.FUNCTION or not child.idle:
            return
        del self.waiting[child]
        if reply.kind is Kind.FAILED:
            self.failures.append((child.rank, Failure.decode(reply.body)))
        else:
            self.results[child.rank] = reply.body

    def lost(self, child: Child) -> None:
        """The worker will not answer."""
        if self.waiting.pop(child, None) is not None:
            self.gone = child
