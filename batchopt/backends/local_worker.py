"""A worker in this process: the map function with a module, and rows to sum gradients in; and the exceptions of several
workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from batchopt._mapreduce.answers import Answer, Span, partials_of
from batchopt._program.flat_module import Gradient
from batchopt.errors import WorkerError
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.layout import Layout
from batchopt_workers.map.evaluate import Evaluator
from batchopt_workers.map.sums import Row, Rows
from batchopt_workers.map.tree import most_held
from batchopt_workers.map.watch import StateWritten, Watch
from batchopt_workers.process.failures import kinds_of, message_of
from batchopt_workers.process.interrupts import let_through
from batchopt_workers.process.messages import TASKS, Cut, Kind, Order, Report
from batchopt_workers.tasks.forms import Form, Output, sums_layout
from batchopt_workers.tasks.task import Task
from batchopt_workers.tasks.task_runner import ChunkDone, of_term
from batchopt_workers.worker import Precode, Worker


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


class LocalWorker:
    """Evaluates orders with an evaluator, whose errors become those of a worker."""

    def __init__(self, evaluator: Evaluator, layout: Layout, changes: int, watch: Watch) -> None:
        """`changes`: numbers that an evaluation reports of the module's state."""
        self.evaluator = evaluator
        self.rank = evaluator.worker.rank  # by which answers and errors name it
        self._layout, self._changes = layout, changes
        self.rows = self._make_rows(1)
        self._over: tuple[Gradient, Rows] | None = None  # see `rows_over`
        self.evaluator.walk.watch = watch
        self.report: Report | None = None  # of the last order
        self.outputs: Output | None = None  # where evaluations write what the module returns

    def _make_rows(self, count: int) -> Rows:
        return Rows(self._layout, self._changes, count, None, self.evaluator.worker.device)

    def follow(self, watch: Watch, changes: int) -> None:
        """Take over changes of the module: the tensors to watch, and the numbers that report its state."""
        self.evaluator.walk.watch = watch
        self.evaluator.look_again()
        if changes != self._changes:
            self._changes = changes
            self.rows, self._over = self._make_rows(len(self.rows)), None

    def begin_task(self, task: Task, batch: Batch | None, output: Output) -> None:
        """Begin a task on the loaded batch or on another one, whose orders write to `output`."""
        tasks = self.evaluator.tasks
        subject = batch if task.aside else of_term(self.evaluator.loaded.batch, task.term)
        assert subject is not None
        tasks.begin(task, subject)
        tasks.output = output

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        turn: AbstractContextManager[Any] | None = None,
        found: Sequence[ChunkDone] = (),
    ) -> Answer:
        """Evaluate the chunks of an order, each within `turn`, unless they were `found` already. Raises `WorkerError`
        if the user's code raises, and `StateWritten`."""
        evaluator, rank = self.evaluator, self.rank
        if order.kind in TASKS:
            evaluator.tasks.loaded.cut = cut
        else:
            evaluator.cut = cut
            evaluator.outputs = self.outputs
            self._have_rows(most_held(order.first, order.last, cut.chunks))
        results: dict[int, list[Any]] = {}
        forms: dict[int, Form] = {}
        done = None
        for done in found or self.chunks(order, turn):
            if done.results:
                results[done.next - 1] = [*done.results]
            if done.form is not None:
                forms[done.next - 1] = done.form
        assert done is not None
        self.report = report = done.report()
        rows = self.rows if order.kind not in TASKS else self._rows_of_task(forms) if order.kind is Kind.TOTAL else None
        partials = partials_of(report, rows)
        span = Span(report.began, report.seconds, order.first, order.last)
        samples_done = cut.bounds[order.last] - cut.bounds[order.first]
        return Answer(rank, samples_done, report.seconds, partials, results, [span], report.drew, forms)

    def rows_over(self, gradient: Gradient) -> Rows | None:
        """Return a row over this memory; None where it has not the precision of sums, or cannot be written here."""
        if self._over is None or self._over[0] is not gradient:
            own = self.rows[0]
            if gradient.vector.dtype != own.gradient.dtype or gradient.vector.is_inference():
                return None
            rows = self._make_rows(0)
            rows.append(Row(gradient.vector, gradient.views, own.changes))
            self._over = gradient, rows
        return self._over[1]

    def chunks(
        self, order: Order, turn: AbstractContextManager[Any] | None = None, rows: Rows | None = None
    ) -> Iterator[ChunkDone]:
        """Evaluate the chunks of an order one by one, for which everything is ready, into `rows` or else its own;
        raises as `evaluate`."""
        evaluator, rank = self.evaluator, self.rank
        try:
            chunks = evaluator.evaluate(order, self.rows if rows is None else rows)
            yield from chunks if turn is None else _each_in(turn, chunks)
        except StateWritten:
            raise
        except Exception as error:
            let_through(error)
            samples = evaluator.current
            loaded = evaluator.tasks.loaded if order.kind in TASKS else evaluator.loaded
            terms = loaded.batch.numbering.within(samples)
            name, message, kinds = type(error).__name__, message_of(error), kinds_of(error)
            raise WorkerError(rank, name, message, samples, terms=terms, kinds=kinds) from error

    def _have_rows(self, count: int) -> None:
        if count > len(self.rows):
            self.rows, self._over = self._make_rows(count), None

    def _rows_of_task(self, forms: Mapping[int, Form]) -> Rows:
        """Return the rows of the last total if there are enough of them."""
        form = next(iter(forms.values()))
        return self.evaluator.tasks.totals.rows(sums_layout(form.columns), 1)


def _each_in(turn: AbstractContextManager[Any], chunks: Iterator[ChunkDone]) -> Iterator[ChunkDone]:
    done: ChunkDone | None
    while True:
        with turn:
            done = next(chunks, None)
        if done is None:
            return
        yield done


def run_precode(precode: Precode | None, worker: Worker) -> None:
    """Run the user's precode. Raises `WorkerError` if it raises."""
    if precode is None:
        return
    try:
        precode(worker)
    except Exception as error:
        let_through(error)
        name, message = type(error).__name__, message_of(error)
        raise WorkerError(worker.rank, name, message, range(0), "running precode") from error
