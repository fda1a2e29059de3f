"""Collects the worker processes' replies to an evaluation, or a call of a function."""

from __future__ import annotations

import math
import pickle
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchopt._mapreduce.answers import Answer, Span, partials_of
from batchopt.backends.base import Run
from batchopt.backends.process.channel import PendingCall, ProtocolError
from batchopt.backends.process.paces import Stragglers
from batchopt.backends.process.pool import IGNORE, Pool
from batchopt.backends.process.roster import SILENT
from batchopt.backends.process.scheduler import ChunkRun, WorkerScheduler
from batchopt.backends.process.wanted import Activity, SessionCall
from batchopt.backends.process.worker import Listener, WorkerProcess, error_of
from batchopt.errors import PoisonChunkError, WorkerError, WorkerLostError
from batchopt_workers.batch.batch import Numbering
from batchopt_workers.evaluate.sums import Report, Rows
from batchopt_workers.evaluate.tree import Node
from batchopt_workers.functions.forms import Form, sums_layout
from batchopt_workers.life import faults
from batchopt_workers.wire.failures import Failure, let_through, message_of
from batchopt_workers.wire.orders import CHUNK, TASKS, Cut, Kind, Message, Order
from batchopt_workers.wire.packets import Received


class _Raised(NamedTuple):
    start: float  # of the samples that the error concerns
    rank: int
    error: BaseException


class Failures:
    """Exceptions of the user's code in workers. The one that is raised does not depend on the order of replies."""

    def __init__(self) -> None:
        self._found: list[_Raised] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, error: BaseException, rank: int, start: float = math.inf) -> None:
        """Note an exception in a worker that concerns samples from `start` on."""
        self._found.append(_Raised(start, rank, error))

    def first(self) -> BaseException:
        """The exception about the first samples, of the lowest rank."""
        return min(self._found, key=lambda found: (found.start, found.rank)).error


@dataclass
class _Work:
    """The reports of a worker about an evaluation: the last report, the time of each order by its number; and, by
    chunk, the results of the posthook, how many were None, and the forms of results where they differ from those of the
    chunk before; `form`: that before the first one, if there was any."""

    report: Report = field(default_factory=lambda: Report(0, 0.0, 0.0, False, ()))
    spans: dict[int, Span] = field(default_factory=dict)
    hooked: dict[int, bytes] = field(default_factory=dict)
    nones: dict[int, int] = field(default_factory=dict)
    forms: dict[int, bytes] = field(default_factory=dict)
    form: bytes = b""

    def form_of_each(self, rank: int) -> dict[int, Form]:
        """Return the form of each chunk's result; `rank`: of the worker."""
        found: dict[int, Form] = {}
        form: Form | None = unpickled(rank, "the function", self.form) if self.form else None
        for span in self.spans.values() if self.forms or self.form else ():
            for chunk in range(span.first, span.last):
                if chunk in self.forms:
                    form = unpickled(rank, "the function", self.forms[chunk])
                if form is not None:
                    found[chunk] = form
        return found


class ProcessGather(Listener):
    """Collects what workers report of one evaluation of a batch with this `numbering` of its samples.

    Updates the paces (seconds per sample, by rank) of `stragglers` for the kind of its orders, and passes reports of
    earlier evaluations to them. `copies`: as in `WorkerScheduler`.
    """

    def __init__(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        numbering: Numbering,
        stragglers: Stragglers,
        copies: bool = True,
    ) -> None:
        self.cut = cut
        self.scheduler = WorkerScheduler([ChunkRun(*run) for run in runs], cut.chunks, copies)
        self.failures = Failures()
        self.poison: PoisonChunkError | None = None
        self.gone: list[WorkerProcess] = []
        self.work: dict[WorkerProcess, _Work] = {}  # of those that have reported anything
        self.order, self._runs = order, runs
        self._numbering, self._pace, self._stragglers = numbering, stragglers.paces[order.kind], stragglers

    @property
    def is_task(self) -> bool:
        """Tell whether its orders are about a task."""
        return self.order.kind in TASKS

    def abandon(self, living: Collection[WorkerProcess]) -> None:
        """End the evaluation: everything is done, and `living` workers that still evaluate are late."""
        for worker in living:
            current = self.scheduler.current(worker.rank)
            if current is not None and worker.evaluates and self._is_ours(worker):
                self._stragglers.abandon(worker, self.cut, *current)
        self._stragglers.measure(self.order.kind, living)

    def held(self, worker: WorkerProcess) -> tuple[Node, ...]:
        """Return the nodes of the tree whose sums the worker holds."""
        work = self.work.get(worker)
        return () if work is None else tuple(node for node, _ in work.report.partials)

    def estimate(self, worker: int, chunk: int) -> float | None:
        """Return the seconds that the chunk should take there, by its last work or else by that of the slowest
        worker."""
        pace = self._pace.get(worker, max(self._pace.values(), default=None))
        return None if pace is None else pace * (self.cut.bounds[chunk + 1] - self.cut.bounds[chunk])

    def _is_ours(self, worker: WorkerProcess) -> bool:
        return worker.given.evaluation == self.order.evaluation

    def _work_of(self, worker: WorkerProcess) -> _Work:
        # a worker says nothing of a form that it has sent before, unless it was called since
        return self.work.setdefault(worker, _Work(form=worker.given.form if self.is_task else b""))

    def on_message(self, worker: WorkerProcess, message: Received) -> None:
        """Handle a message. Raises `ProtocolError` for one that cannot be right."""
        if not self._is_ours(worker):
            return
        if message.kind is Message.FAILED:
            failure = Failure.decode(message.body)
            error = error_of(worker.rank, failure, None, self._numbering)
            self.failures.add(error, worker.rank, failure.samples.start)
        elif len(message.body) < CHUNK.size:
            raise ProtocolError(f"a message of {len(message.body)} bytes")
        else:
            work = self._work_of(worker)
            (chunk,) = CHUNK.unpack_from(message.body)
            found = work.hooked if message.kind is Message.HOOKED else work.forms
            found.setdefault(chunk, message.body[CHUNK.size :])
        faults.point("parent.heard")

    def on_report(self, worker: WorkerProcess) -> None:
        """Handle a report. Raises `ProtocolError` for one that cannot be right."""
        if not self._is_ours(worker):
            return
        try:
            report, hooked = worker.page.read(None if self.is_task else worker.memory.rows)
            self._check(report)
            self.scheduler.reported(worker.rank, report.next, time.monotonic())
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        work = self._work_of(worker)
        if self.is_task and report.partials and not (work.forms or work.form):
            raise ProtocolError("a report of results without their form")
        work.report = report
        span = Span(report.began, report.seconds, worker.given.first, report.next)
        work.spans[worker.given.number] = span
        if hooked:
            for chunk in range(span.first, span.last):
                if chunk in worker.heard.nones:
                    work.nones.setdefault(chunk, worker.heard.nones[chunk])
        samples = self._samples(span)
        if samples > 0:
            self._pace[worker.rank] = report.seconds / samples
        faults.point("parent.heard")

    def on_done(self, worker: WorkerProcess) -> None:
        """Note that the worker has ended its order."""
        if self._is_ours(worker):
            self.scheduler.ended(worker.rank)
        else:
            self._stragglers.on_done(worker)

    def _samples(self, span: Span) -> int:
        return self.cut.bounds[span.last] - self.cut.bounds[span.first]

    def _check(self, report: Report) -> None:
        for node, partial in report.partials:
            if not 0 <= node.level < 64 or not 0 <= node.first_chunk < self.cut.chunks:
                raise ValueError(f"a partial {node} of {self.cut.chunks} chunks")
            if self.is_task and partial.row >= self.cut.chunks:
                raise ValueError(f"a partial {node} in row {partial.row}")

    def on_lost(self, worker: WorkerProcess, ending: str) -> None:
        """Abandon what the worker had not reported. What it had reported counts: its rows are in memory shared with
        this process, and no other worker writes there."""
        self._stragglers.on_lost(worker, ending)
        self.gone.append(worker)
        chunk = self.scheduler.lost(worker.rank, worker.death)
        if chunk is not None:
            samples = range(self.cut.bounds[chunk], self.cut.bounds[chunk + 1])
            terms, deaths = self._numbering.within(samples), self.scheduler.ledger.losses[chunk]
            self.poison = PoisonChunkError(chunk, samples, ending, terms, deaths)

    @property
    def went_as_planned(self) -> bool:
        """Tell whether each worker carried out exactly what was meant for it."""
        planned = {rank: tuple(run) for rank, run in enumerate(self._runs) if run[0] < run[1]}
        spans = [(worker.rank, span[2:]) for worker, work in self.work.items() for span in work.spans.values()]
        return len(spans) == len(planned) and dict(spans) == planned

    @property
    def has_reports(self) -> bool:
        """Tell whether any chunk was reported."""
        return any(work.spans for work in self.work.values())

    def answers(self) -> list[Answer]:
        """Return the workers' answers, in rank order. Partials of two workers may contain the same chunk."""
        found = []
        done = {worker: work for worker, work in self.work.items() if work.spans}
        forms = {worker: work.form_of_each(worker.rank) for worker, work in done.items()}
        form = next((form for of_worker in forms.values() for form in of_worker.values()), None)
        for worker, work in sorted(done.items(), key=lambda item: item[0].rank):
            partials = partials_of(work.report.partials, self._rows(worker, work.report, form))
            spans = [*work.spans.values()]
            samples, seconds = sum(map(self._samples, spans)), sum(span.seconds for span in spans)
            results = {chunk: [None] * count for chunk, count in work.nones.items()}
            results |= {chunk: unpickled(worker.rank, "posthook", body) for chunk, body in work.hooked.items()}
            found.append(
                Answer(worker.rank, samples, seconds, partials, results, spans, work.report.drew, forms[worker])
            )
        return found

    def _rows(self, worker: WorkerProcess, report: Report, form: Form | None) -> Rows | None:
        """Return the rows that hold the worker's sums."""
        if not self.is_task:
            return worker.memory.rows
        if form is None or worker.memory.totals is None or self.order.kind is Kind.COLLECT:
            return None
        count = max((partial.row for _, partial in report.partials), default=0) + 1
        return worker.memory.totals.rows(sums_layout(form.columns), count)


class _Calls(Listener):
    """The replies to a function that was called in all workers."""

    def __init__(self) -> None:
        self.failures = Failures()
        self.waiting: set[WorkerProcess] = set()
        self.results: dict[int, bytes] = {}

    def on_reply(self, worker: WorkerProcess, asked: PendingCall, reply: Received) -> None:
        """Handle a result or a failure of this call; others belong to an earlier one."""
        if worker not in self.waiting or asked.activity is not Activity.FUNCTION or worker.state not in SILENT:
            return
        self.waiting.discard(worker)
        if reply.kind is Message.REFUSED:
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
    pool.pump(IGNORE, 0.0)  # workers that have ended by now will not begin it
    pool.wait()
    calls = _Calls()
    for _, worker in sorted(pool.workers.items()):
        calls.waiting.add(worker)
        worker.ask(message)
        worker.channel.flush()
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
    faults = [worker for worker in gone if worker.killed is None and worker.process.exitcode == -signal.SIGSEGV]
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
