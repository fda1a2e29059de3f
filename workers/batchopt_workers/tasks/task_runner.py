"""The map of tasks: a function of the user for each chunk of a batch, whose results are collected or summed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from batchopt_workers.data.batch import Batch, Piece
from batchopt_workers.map.chunk import LoadedBatch, Walk, restoring
from batchopt_workers.map.sums import PartialSum, Rows, Sums, grads_kept
from batchopt_workers.map.tree import most_held
from batchopt_workers.map.watch import ParameterWatch
from batchopt_workers.process import faults
from batchopt_workers.process.messages import Cut, Kind, Order, Report
from batchopt_workers.tasks.forms import Form, MemoryOutput, Output, real, sums_form, sums_layout, write_results
from batchopt_workers.tasks.jacobian import PieceResiduals
from batchopt_workers.tasks.task import Modes, PrivateTotals, Surroundings, Task, Totals


class ChunkDone(NamedTuple):
    """The chunks of an order before `next` are done; they began at `began`, and took `seconds`. `results`: what the
    posthook returned for the last one; `form`: that of a task's result."""

    sums: Sums
    next: int
    began: float
    seconds: float  # since `began`
    drew: bool = False
    results: Sequence[Any] = ()
    form: Form | None = None

    def report(self) -> Report:
        """Return the report of the evaluation, valid until the next chunk is begun."""
        return self.sums.report(self.next, self.began, self.seconds, self.drew)

    @property
    def says_something(self) -> bool:
        """Tell whether a hook returned anything."""
        for result in self.results:
            if result is not None:
                return True
        return False


class F(Protocol):
    """The function that is minimised, as far as tasks use it."""

    def loss_of(self, piece: Piece, term: int) -> torch.Tensor:
        """Return the loss of a piece for that term, with its graph."""

    def residuals_of(self, piece: Piece, term: int) -> PieceResiduals:
        """Return the residuals whose mean square is the loss of a piece for that term."""

    def weight_of(self, term: int) -> float:
        """Return the weight of that term in f."""

    def loaded_batch(self) -> Batch:
        """Return the batch of f, as far as this worker has it."""

    def evaluate_all(
        self, step: int, cut: Cut, gradient: bool, batch: Batch | None = None, later: int = 0
    ) -> tuple[tuple[float, ...], torch.Tensor]:
        """Return each term's loss for the loaded batch, or another one of the same terms, with this cut, and df/dX
        (shape `(n,)`; empty unless `gradient`); with the draws of a step that is so much `later`."""


class TaskRunner:
    """Runs orders to collect and to total, for the task that was begun last.

    Rows are written to `output`, sums to rows of `totals`.
    """

    def __init__(self, walk: Walk, module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self.output: Output = MemoryOutput()
        self.totals: Totals = PrivateTotals()
        self._walk, self._module, self._parameters = walk, module, parameters
        self._task: Task | None = None
        self._loaded: LoadedBatch | None = None
        self._sums: Sums | None = None
        self._form: Form | None = None  # of the current evaluation
        self._rows: Rows | None = None
        self._modes: Modes | None = None  # of the module, as long as it may be in others

    def begin(self, task: Task, batch: Batch) -> None:
        """Run this task on chunks of `batch` from now on; if the task has a term, that is the batch's only part."""
        self._task, self._loaded, self._sums = task, LoadedBatch(batch, keeps=False), None

    def end(self) -> None:
        """Release everything of the task, and its batch; restore modes, if an interrupt has left others."""
        if self._modes is not None:
            self._modes.restore()
            self._modes = None
        self._task = self._loaded = self._sums = self._form = self._rows = None
        self.output = MemoryOutput()

    @property
    def loaded(self) -> LoadedBatch:
        """The task's batch with its cut. Raise `RuntimeError` if there is none."""
        if self._loaded is None:
            raise RuntimeError("no task was begun in this worker")
        return self._loaded

    def evaluate(self, order: Order, f: F) -> Iterator[ChunkDone]:
        """Run the task on the chunks of `order`, one after the other."""
        loaded, task = self.loaded, self._task
        assert task is not None
        if self._sums is None or self._sums.evaluation != order.evaluation:
            self._sums, self._form = Sums(order.evaluation, loaded.cut.chunks), None
        sums, totals = self._sums, order.kind is Kind.TOTAL
        needed = most_held(order.first, order.last, loaded.cut.chunks, sums.nodes)
        began = time.perf_counter()
        watch = None if task.writes else ParameterWatch(self._module, self._parameters, self._walk.protected)
        modes = self._modes = Modes(self._module, task.train)
        self._walk.watch.begin(compares=task.is_users or not modes.plain)
        for chunk in range(order.first, order.last):
            row = sums.free_row()
            with restoring(self._walk, loaded), grads_kept(self._parameters):
                results = []
                try:
                    for number, piece in enumerate(self._walk.pieces(loaded, order.step, chunk)):
                        faults.point("worker.forward", chunk)
                        with modes, self._walk.undone() if task.is_users else nullcontext():
                            result = task.function(piece, self._around(piece, order.step, f))
                        faults.point("worker.returned", chunk)
                        if totals:
                            form = self._total(result, needed, row, number == 0)
                        else:
                            results.append(result)
                finally:
                    if watch is not None:
                        watch.check()
                if not totals:
                    form = write_results(self.output, results, loaded.batch.parts[0], self._walk.current)
            faults.point("worker.merge", chunk)
            sums.add(chunk, PartialSum(row, (), b""), self._rows if totals else None)
            self._walk.current = range(0)
            if chunk + 1 == order.last:
                self._modes = None  # restored
            yield ChunkDone(sums, chunk + 1, began, time.perf_counter() - began, form=form)

    def _around(self, piece: Piece, step: int, f: F) -> Surroundings:
        assert self._task is not None
        term = piece.term if self._task.term is None else self._task.term
        return Surroundings(
            self._walk.worker,
            self._module,
            self._parameters,
            partial(f.loss_of, piece, term),
            partial(f.residuals_of, piece, term),
            piece.weight * f.weight_of(term),
            f.loaded_batch,
            partial(f.evaluate_all, step),
        )

    def _total(self, result: Any, needed: int, row: int, first: bool) -> Form:
        """Add the result of a piece (`first`: of its chunk) to a row, and return its form."""
        form, tensors = sums_form(result)
        if self._form is None:
            self._form, self._rows = form, None
        if form.columns != self._form.columns:
            raise ValueError(
                f"the function returned {_listed(form)} here, and {_listed(self._form)} for other samples: sums "
                "need one structure, with the same shapes and dtypes"
            )
        if self._rows is None or len(self._rows) < needed:
            self._rows = self.totals.rows(sums_layout(form.columns), needed)
        with torch.no_grad():
            for view, tensor in zip(self._rows[row].views, tensors, strict=True):
                view.copy_(real(tensor)) if first else view.add_(real(tensor))
        return self._form


def _listed(form: Form) -> str:
    return ", ".join(map(str, form.columns))


def of_term(batch: Batch, term: int | None) -> Batch:
    """Return the samples of one term as a batch of their own; None: the batch with all terms."""
    return batch if term is None else Batch((batch.parts[term],))
