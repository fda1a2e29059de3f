"""Collects the worker processes' replies to an evaluation, or a call of a function."""

from __future__ import annotations

import math
import pickle
import signal
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from batchopt._mapreduce.answers import Answer, Span, partials_of
from batchopt.backends.local_worker import Failures
from batchopt.backends.process.channel import ProtocolError, WorkerReply
from batchopt.backends.process.paces import Overdue, Pace
from batchopt.backends.process.pool import Pool
from batchopt.backends.process.scheduler import Assign, ChunkRun, WorkerScheduler
from batchopt.backends.process.worker import Activity, Ignore, PendingMessage, SessionCall, WorkerProcess, error_of
from batchopt.errors import PoisonChunkError, WorkerError, WorkerLostError
from batchopt_workers.data.batch import Numbering
from batchopt_workers.map.sums import Rows
from batchopt_workers.map.tree import Node
from batchopt_workers.process import faults
from batchopt_workers.process.failures import Failure, message_of
from batchopt_workers.process.interrupts import let_through
from batchopt_workers.process.messages import CHUNK, TASKS, Cut, Kind, Order, Report
from batchopt_workers.tasks.forms import Form, sums_layout


class ProcessGather:
    """Collects the replies to one evaluation of a batch with this `numbering` of its samples.

    Updates the entry of `paces` (seconds per sample, by rank) for the kind of its orders. Replies to earlier
    evaluations are passed to `overdue`. `copies`: as in `WorkerScheduler`.
    """

    def __init__(
        self,
        cut: Cut,
        numbering: Numbering,
        orders: Sequence[Order | None],
        paces: Mapping[Kind, dict[int, float]],
        overdue: Overdue | None = None,
        copies: bool = True,
    ) -> None:
        some = next(order for order in orders if order is not None)
        self.cut = cut
        runs = [None if o is None else ChunkRun(o.first, o.last) for o in orders]
        self.scheduler = WorkerScheduler(runs, cut.chunks, copies)
        self.failures = Failures()
        self.poison: PoisonChunkError | None = None
        self.gone: list[WorkerProcess] = []
        self._order, self._evaluation = some, some.evaluation
        self._numbering, self._pace = numbering, paces[some.kind]
        self._overdue = Overdue(paces) if overdue is None else overdue
        self._orders: dict[WorkerProcess, Order] = {}  # the last of each
        self._reports: dict[WorkerProcess, Report] = {}
        self._spans: dict[tuple[WorkerProcess, int], Span] = {}  # by order
        self._hooked: dict[int, tuple[WorkerProcess, bytes]] = {}
        self._forms: dict[int, tuple[WorkerProcess, bytes]] = {}

    @property
    def is_task(self) -> bool:
        """Tell whether its orders are about a task."""
        return self._order.kind in TASKS

    def order(self, worker: WorkerProcess, run: Assign) -> Order:
        """The order that gives the worker this run."""
        self._orders[worker] = self._order._replace(first=run.first, last=run.last)
        return self._orders[worker]

    def leave(self, living: Collection[WorkerProcess]) -> dict[int, Pace]:
        """End the evaluation: everything is done, and `living` workers that still evaluate are overdue. Return the
        resulting measurements of their pace, by rank."""
        for worker, order in self._orders.items():
            current = self.scheduler.current(worker.rank)
            if current is not None and worker in living and not worker.free:
                self._overdue.leave(worker, order, self.cut, *current)
        return self._overdue.take(self._order.kind, living)

    def held(self, worker: WorkerProcess) -> tuple[Node, ...]:
        """Return the nodes of the tree whose sums the worker holds."""
        report = self._reports.get(worker)
        return () if report is None else tuple(summary.node for summary in report.summaries)

    def estimate(self, worker: int, chunk: int) -> float | None:
        """Return the seconds that the chunk should take there, by its last work or else by that of the slowest
        worker."""
        pace = self._pace.get(worker, max(self._pace.values(), default=None))
        return None if pace is None else pace * (self.cut.bounds[chunk + 1] - self.cut.bounds[chunk])

    def on_reply(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """Handle a reply. Raises `ProtocolError` for one that cannot be right."""
        if asked.order is None or asked.order.evaluation != self._evaluation:
            self._overdue.on_reply(worker, asked, reply)  # of an abandoned evaluation
            return
        if reply.kind is Kind.FAILED:
            failure = Failure.decode(reply.body)
            error = error_of(worker.rank, failure, None, self._numbering)
            self.failures.add(error, worker.rank, failure.samples.start)
            self.scheduler.ended(worker.rank)
        elif reply.kind in (Kind.HOOKED, Kind.FORM):
            (chunk,) = CHUNK.unpack_from(reply.body)
            found = self._hooked if reply.kind is Kind.HOOKED else self._forms
            found.setdefault(chunk, (worker, reply.body[CHUNK.size :]))
        elif reply.kind in (Kind.REPORT, Kind.DONE):
            self._reported(worker, asked, reply)
        faults.point("parent.heard")

    def _reported(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        assert asked.order is not None
        try:
            report = Report.decode(reply.body)
            self._check(worker, report)
            self.scheduler.reported(worker.rank, report.next, time.monotonic())
        except (ValueError, struct.error) as error:
            raise ProtocolError(str(error)) from error
        self._reports[worker] = report
        span = Span(report.began, report.seconds, asked.order.first, report.next)
        self._spans[worker, reply.number] = span
        samples = self._samples(span)
        if samples > 0:
            self._pace[worker.rank] = report.seconds / samples
        if reply.kind is Kind.DONE:
            self.scheduler.ended(worker.rank)

    def _samples(self, span: Span) -> int:
        return self.cut.bounds[span.last] - self.cut.bounds[span.first]

    def _check(self, worker: WorkerProcess, report: Report) -> None:
        if report.evaluation != self._evaluation:
            raise ValueError(f"a report of evaluation {report.evaluation} during {self._evaluation}")
        rows = self.cut.chunks if self.is_task else 0 if worker.rows is None else len(worker.rows)
        for summary in report.summaries:
            if summary.row >= rows or summary.node.first_chunk >= self.cut.chunks:
                raise ValueError(f"a partial {summary.node} in row {summary.row} of {rows}")
            if len(summary.losses) != (0 if self.is_task else len(self._numbering.names)):
                raise ValueError(f"{len(summary.losses)} losses of {len(self._numbering.names)} terms")

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Abandon what the worker had not reported. What it had reported counts: its rows are in memory shared with
        this process, and no other worker writes there."""
        self._overdue.on_lost(worker, ending)
        self.gone.append(worker)
        chunk = self.scheduler.lost(worker.rank, worker.death)
        if chunk is not None:
            samples = range(self.cut.bounds[chunk], self.cut.bounds[chunk + 1])
            terms, deaths = self._numbering.within(samples), self.scheduler.ledger.losses[chunk]
            self.poison = PoisonChunkError(chunk, samples, ending, terms, deaths)

    def went_as(self, orders: Sequence[Order | None]) -> bool:
        """Tell whether each worker carried out exactly these orders."""
        spans = {worker.rank: (span.first, span.last) for (worker, _), span in self._spans.items()}
        given = {rank: (order.first, order.last) for rank, order in enumerate(orders) if order is not None}
        return len(self._spans) == len(given) and spans == given

    @property
    def has_reports(self) -> bool:
        """Tell whether any chunk was reported."""
        return bool(self._reports)

    def answers(self) -> list[Answer]:
        """Return the workers' answers, in rank order. Partials of two workers may contain the same chunk."""
        if not self._reports:
            return []
        found = []
        results = self._by_worker(self._hooked, "posthook")
        forms = self._by_worker(self._forms, "the function")
        spans: dict[WorkerProcess, list[Span]] = {worker: [] for worker in self._reports}
        for (worker, _), span in self._spans.items():
            spans[worker].append(span)
        form = next((form for of_worker in forms.values() for form in of_worker.values()), None)
        for worker, report in sorted(self._reports.items(), key=lambda item: item[0].rank):
            partials = partials_of(report, self._rows(worker, report, form))
            samples, seconds = sum(map(self._samples, spans[worker])), sum(span.seconds for span in spans[worker])
            found.append(
                Answer(
                    worker.rank, samples, seconds, partials, results[worker], spans[worker], report.drew, forms[worker]
                )
            )
        return found

    def _by_worker(
        self, bodies: Mapping[int, tuple[WorkerProcess, bytes]], what: str
    ) -> dict[WorkerProcess, dict[int, Any]]:
        """Unpickle the results of each chunk, grouped by sender; by another worker if the sender has reported nothing:
        it died in between, and the chunk was evaluated again."""
        found: dict[WorkerProcess, dict[int, Any]] = {worker: {} for worker in self._reports}
        fallback = next(iter(found))
        for chunk, (worker, body) in bodies.items():
            found[worker if worker in found else fallback][chunk] = unpickled(worker.rank, what, body)
        return found

    def _rows(self, worker: WorkerProcess, report: Report, form: Form | None) -> Rows | None:
        """Return the rows that hold the worker's sums."""
        if not self.is_task:
            return worker.rows
        if form is None or worker.totals is None or self._order.kind is Kind.COLLECT:
            return None
        count = max((summary.row for summary in report.summaries), default=0) + 1
        return worker.totals.rows(sums_layout(form.columns), count)


class _Calls:
    """The replies to a function that was called in all workers."""

    def __init__(self) -> None:
        self.failures = Failures()
        self.waiting: set[WorkerProcess] = set()
        self.results: dict[int, bytes] = {}

    def on_reply(self, worker: WorkerProcess, asked: PendingMessage, reply: WorkerReply) -> None:
        """Handle a result or a failure of this call; others belong to an earlier one."""
        if worker not in self.waiting or asked.activity is not Activity.FUNCTION or not worker.idle:
            return
        self.waiting.discard(worker)
        if reply.kind is Kind.FAILED:
            error = error_of(worker.rank, Failure.decode(reply.body), Activity.FUNCTION)
            self.failures.add(error, worker.rank)
        else:
            self.results[worker.rank] = reply.body

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Raise `WorkerLostError` for a worker that has not answered: the effects of the call there are unknown."""
        if worker in self.waiting:
            raise WorkerLostError(f"a function was not run to its end: {ending}")


def run_everywhere(pool: Pool, message: SessionCall) -> list[Any]:
    """Call a function in all workers; return the values in rank order. Raises what it raises, and `WorkerLostError`."""
    pool.pump(Ignore(), 0.0)  # workers that have ended by now will not begin it
    pool.wait()
    calls = _Calls()
    for _, worker in sorted(pool.workers.items()):
        calls.waiting.add(worker)
        worker.ask(message)
        with suppress(OSError):  # gone; the pool will find out
            worker.flush()
    while calls.waiting:
        pool.pump(calls, math.inf)
    if calls.failures:
        raise calls.failures.first()
    return [unpickled(rank, "the function", body) for rank, body in sorted(calls.results.items())]


def unpickled(rank: int, what: str, body: bytes) -> Any:
    """Unpickle the value of the user's function in a worker. Raises `WorkerError` if it cannot be unpickled here."""
    try:
        return pickle.loads(body)
    except Exception as error:
        let_through(error)
        where = f"raised here, where what {what} returned is unpickled: return tensors, numbers and text"
        message = f"{message_of(error)} ({where})"
        raise WorkerError(rank, type(error).__name__, message, range(0)) from error


def explain(gone: Sequence[WorkerProcess], what: str) -> None:
    """Raise `WorkerLostError` if two workers were killed by SIGSEGV or SIGBUS in `what`, before it has ever succeeded:
    the next ones would be, too."""
    faults = [worker for worker in gone if not worker.verdict and worker.process.exitcode == -signal.SIGSEGV]
    if len(faults) < 2:
        return
    worker = faults[1]
    raise WorkerLostError(
        f"{worker.process.name} was killed by SIGSEGV (segmentation fault) in the {what}, "
        f"{_place(worker.stderr.tail)}. Workers only read the parameters; writing to them in a worker causes this: if "
        "the first forward makes or writes parameters (lazy initialisation, variational strategies), call the module "
        "once before it is given to batchopt; if each one does, or a hook or function, use parallelize=1 or write to "
        "copies"
    )


def _place(standard_error: str) -> str:
    """Return the place where a process crashed, as Python's faulthandler wrote it: the last of the user's calls."""
    _, found, stack = standard_error.rpartition("(most recent call first):\n")
    calls = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
    return f"at {'; called from '.join(calls[:3])}" if found and calls else "at an unknown place"
