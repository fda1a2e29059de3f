"""A worker that lives in this process: the map function with a module, and rows to sum gradients in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from batchopt._mapreduce.answers import Answer, Partial, Span
from batchopt.errors import WorkerError
from batchopt_workers.evaluate import Evaluator
from batchopt_workers.failures import message_of
from batchopt_workers.layout import Layout
from batchopt_workers.messages import Cut, Order
from batchopt_workers.rows import Rows
from batchopt_workers.tree import most_held
from batchopt_workers.watch import StateWritten, Watch
from batchopt_workers.worker import Precode, Worker


class LocalWorker:
    """Evaluates orders with an evaluator, whose errors become those of a worker."""

    def __init__(self, evaluator: Evaluator, layout: Layout, changes: int, watch: Watch) -> None:
        """`changes`: numbers that an evaluation reports of the module's state."""
        self.evaluator = evaluator
        self._layout, self._changes = layout, changes
        self._rows = self._make_rows(1)
        self.evaluator.watch = watch
        self._examined = False  # whether an evaluation has shown which constants a forward writes

    def _make_rows(self, count: int) -> Rows:
        return Rows(self._layout, self._changes, count, None, self.evaluator.worker.device)

    def follow(self, watch: Watch, changes: int) -> None:
        """Take over what was changed of the module: the tensors to watch, and the numbers that report its state."""
        self.evaluator.watch = watch
        if changes != self._changes:
            self._changes = changes
            self._rows = self._make_rows(len(self._rows))

    def examine(self) -> None:
        """Compare constants with what they were, too, in the next evaluation."""
        self._examined = False

    def evaluate(self, cut: Cut, order: Order, turn: AbstractContextManager[Any] | None = None) -> Answer:
        """Evaluate the chunks of an order, each within `turn`. Raises `WorkerError` if the user's code raises, and
        `StateWritten`."""
        evaluator, rank = self.evaluator, self.evaluator.worker.rank
        turn = nullcontext() if turn is None else turn
        evaluator.cut = cut
        needed = most_held(order.first, order.last, cut.chunks)
        if needed > len(self._rows):
            self._rows = self._make_rows(needed)
        if not self._examined:
            evaluator.watch.compare()
        results: dict[int, list[Any]] = {}
        report = None
        try:
            chunks = evaluator.evaluate(order, self._rows)
            for _ in range(order.first, order.last):
                with turn:
                    report, of_chunk = next(chunks)
                if of_chunk:
                    results[report.next - 1] = of_chunk
        except StateWritten:
            raise
        except Exception as error:
            batch, samples = evaluator.batch, evaluator.current
            terms = {} if batch is None else batch.numbering.within(samples)
            raise WorkerError(rank, type(error).__name__, message_of(error), samples, terms=terms) from error
        assert report is not None
        self._examined = True
        partials = []
        for summary in report.summaries:
            row = self._rows[summary.row]
            partials.append((summary.node, Partial(summary.losses, row.gradient, row.changes, summary.used)))
        span = Span(report.began, report.seconds, order.first, order.last)
        samples_done = cut.bounds[order.last] - cut.bounds[order.first]
        return Answer(rank, samples_done, report.seconds, partials, results, [span], report.drew)


def run_precode(precode: Precode | None, worker: Worker) -> None:
    """Run the user's precode. Raises `WorkerError` if it raises."""
    if precode is None:
        return
    try:
        precode(worker)
    except Exception as error:
        name, message = type(error).__name__, message_of(error)
        raise WorkerError(worker.rank, name, message, range(0), "running precode") from error
