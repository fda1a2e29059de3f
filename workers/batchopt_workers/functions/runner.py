"""The map of tasks: a function for each chunk of a batch, whose results are collected or summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from batchopt_workers.batch.batch import Batch, Piece
from batchopt_workers.evaluate.chunk import LoadedBatch, Walk
from batchopt_workers.evaluate.gradient import PieceLoss
from batchopt_workers.evaluate.sums import GradsKept, PartialSum, Rows, Sums
from batchopt_workers.evaluate.tree import most_held
from batchopt_workers.evaluate.work import ChunkDone, ChunkResult, EachPiece, run
from batchopt_workers.functions.forms import Form, MemoryOutput, Output, real, sums_form, sums_layout, write_results
from batchopt_workers.functions.jacobian import Block, Jacobian, PieceResiduals
from batchopt_workers.functions.squares import squares_of
from batchopt_workers.functions.task import Evaluation, Modes, PieceContext, PrivateTotals, Task, Totals
from batchopt_workers.life import faults
from batchopt_workers.wire.orders import Cut, Kind, Order


class Evaluates(Protocol):
    """The function that is minimised, as far as tasks use it."""

    @property
    def loss(self) -> PieceLoss:
        """f of a piece."""

    @property
    def loaded(self) -> LoadedBatch:
        """The batch of f, as far as this worker has it."""

    def evaluate_all(
        self, step: int, cut: Cut, gradient: bool, batch: Batch | None = None, later: int = 0
    ) -> Evaluation:
        """Return each term's loss for the loaded batch, or another one of the same terms, with this cut, and df/dX
        (shape `(n,)`; empty unless `gradient`); with the draws of a step that is so much `later`."""


class TaskRunner:
    """Carries out orders to collect and to total, for the task that was begun last.

    Rows are written to `output`, sums to rows of `totals`.
    """

    def __init__(self, walk: Walk, module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self.output: Output = MemoryOutput()
        self.totals: Totals = PrivateTotals()
        self.cut = Cut((0,))  # of the task's batch
        self.use(walk, module, parameters)
        self._task: Task | None = None
        self._aside: Batch | None = None  # the batch of the task, if that is not of the loaded one
        self._loaded: LoadedBatch | None = None
        self._work: TaskWork | None  # of the current evaluation
        self.jacobians: dict[int, Jacobian]  # by term
        self._modes: Modes | None = None  # of the module, as long as it may be in others
        self.looked: tuple[Task, int, bool] | None = None  # the task and the step that were seen to draw, or not

    def begin(self, task: Task, aside: Batch | None) -> None:
        """Run this task from now on, on chunks of the loaded batch or of another one, put `aside` for it; if the task
        has a term, that is its only part."""
        self._task, self._aside, self._loaded, self._work = task, aside, None, None

    def use(self, walk: Walk, module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        """Go on with another copy of the module."""
        self.walk, self.module, self.parameters, self._work = walk, module, parameters, None
        self.jacobians = {}

    @property
    def is_users(self) -> bool:
        """Tell whether the task runs code of the user that is not part of f."""
        return self._task is not None and self._task.is_users

    def end(self) -> None:
        """Release everything of the task, and its batch; restore modes, if an interrupt has left others."""
        if self._modes is not None:
            self._modes.restore()
            self._modes = None
        self._task = self._aside = self._loaded = self._work = self.looked = None
        self.output = MemoryOutput()

    @property
    def loaded(self) -> LoadedBatch:
        """The task's batch with its cut. Raise `RuntimeError` if there is none."""
        if self._loaded is None:
            raise RuntimeError("no task was begun in this worker")
        return self._loaded

    def _batch_of(self, task: Task, f: Evaluates) -> LoadedBatch:
        """Return the task's batch with its cut: that of f with its cache, unless the user's code might write to it."""
        if self._aside is not None:
            return LoadedBatch(self._aside, self.cut, keeps=False)
        loaded, is_ours = f.loaded, task.term is None and not task.is_users
        if is_ours and loaded.is_of_columns and loaded.cut.bounds == self.cut.bounds:
            return loaded
        return LoadedBatch(of_term(loaded.batch, task.term), self.cut, keeps=False)

    def evaluate(self, order: Order, f: Evaluates) -> Iterator[ChunkDone]:
        """Run the task on the chunks of `order`, one after the other: see `run`."""
        task = self._task
        if task is None:
            raise RuntimeError("no task was begun in this worker")
        work = self._work
        if work is None or work.sums.evaluation != order.evaluation:
            self._loaded = self._batch_of(task, f)
            kind = Totalling if order.kind is Kind.TOTAL else Collecting
            self._work = work = kind(self, task, f, Sums(order.evaluation, self.cut.chunks))
        loaded, sums = self.loaded, work.sums
        work.needed = most_held(order.first, order.last, loaded.cut.chunks, tuple(node for node, _ in sums.partials))
        work.modes = self._modes = None if task.train is None else Modes(self.module, task.train)
        with GradsKept(self.parameters):
            for done in run(self.walk, work, loaded, order, sums):
                if done.next == order.last:
                    self._modes = None  # restored
                yield done

    def residuals_of(self, f: Evaluates, piece: Piece, term: int) -> PieceResiduals:
        """Return the residuals whose mean square is the loss of a piece for that term."""
        objective, jacobian = f.loss.objectives[term], self.jacobians.get(term)
        squares = squares_of(objective.criterion, objective.loss_fn)
        assert squares is not None  # otherwise the parent does not request residuals
        if jacobian is None or not jacobian.serves(squares, self.parameters):
            jacobian = self.jacobians[term] = Jacobian(self.module, self.parameters, squares)
        sample = f.loss.sample(piece, term)
        samples = None if self.loaded.batch.parts[piece.term].one_by_one else len(piece.indices)
        return PieceResiduals(jacobian, sample.inputs, sample.targets, samples, piece.indices, piece.sample_weight)

    def jacobian_of_all(self, f: Evaluates, step: int, cut: Cut) -> list[Block]:
        """Return residuals and their derivatives by X of the loaded batch, which has one term, with this cut."""
        loaded, found = LoadedBatch(f.loaded.batch, cut, keeps=False), list[Block]()

        def look(piece: Piece) -> None:
            found.extend(self.residuals_of(f, piece, 0).blocks())

        for _ in run(self.walk, EachPiece(look), loaded, Order(-1, step, 0, cut.chunks), Sums(-1, cut.chunks)):
            pass
        return found


class TaskWork(ABC):
    """The work of a task: its function is called for each piece."""

    rows: Rows | None = None
    drew = False
    needed = 0  # rows, for the order
    modes: Modes | None = None

    def __init__(self, runner: TaskRunner, task: Task, f: Evaluates, sums: Sums) -> None:
        self._runner, self._task, self._f, self.sums = runner, task, f, sums

    @abstractmethod
    def do(self, pieces: Iterable[Piece], loaded: LoadedBatch, step: int, chunk: int, number: int) -> ChunkResult:
        """See `Work.do`."""

    def results(self, pieces: Iterable[Piece], step: int, chunk: int) -> Iterator[Any]:
        """Yield the function's result for each piece."""
        runner, task, f = self._runner, self._task, self._f
        draws, looked = runner.walk.draws, runner.looked
        draws.looks = looked is None or looked[0] is not task or looked[1] != step
        self.drew = looked is not None and looked[2]
        for piece in pieces:
            faults.point("worker.forward", chunk)
            term = piece.term if task.term is None else task.term
            context = PieceContext(
                runner.walk.worker,
                runner.module,
                runner.parameters,
                partial(f.loss.of, piece, term),
                partial(runner.residuals_of, f, piece, term),
                piece.weight * f.loss.weights[term],
                lambda: f.loaded.batch,
                partial(f.evaluate_all, step),
                partial(runner.jacobian_of_all, f, step),
            )
            call = partial(task.function, piece, context)
            with self.modes or nullcontext():
                result = runner.walk.undoable(call) if task.is_users else call()
            runner.walk.put_back()
            faults.point("worker.returned", chunk)
            yield result
        if draws.looks:
            self.drew = draws.found
            runner.looked = task, step, self.drew


class Collecting(TaskWork):
    """Writes the results, a row for each sample."""

    def do(self, pieces: Iterable[Piece], loaded: LoadedBatch, step: int, chunk: int, number: int) -> ChunkResult:
        """See `Work.do`."""
        found = [*self.results(pieces, step, chunk)]
        form = write_results(self._runner.output, found, loaded.batch.parts[0], loaded.chunk(chunk).samples)
        return PartialSum(number, (), b""), None, form


class Totalling(TaskWork):
    """Sums the results in `rows`."""

    form: Form | None = None

    def do(self, pieces: Iterable[Piece], loaded: LoadedBatch, step: int, chunk: int, number: int) -> ChunkResult:
        """See `Work.do`."""
        for i, result in enumerate(self.results(pieces, step, chunk)):
            form, tensors = sums_form(result)
            if self.form is None:
                self.form = form
            if form.columns != self.form.columns:
                raise ValueError(
                    f"the function returned {_listed(form)} here, and {_listed(self.form)} for other samples: sums "
                    "need one structure, with the same shapes and dtypes"
                )
            if self.rows is None or len(self.rows) < self.needed:
                self.rows = self._runner.totals.rows(sums_layout(form.columns), self.needed)
            with torch.no_grad():
                for view, tensor in zip(self.rows[number].views, tensors, strict=True):
                    view.add_(real(tensor)) if i else view.copy_(real(tensor))
        return PartialSum(number, (), b""), None, self.form


def _listed(form: Form) -> str:
    return ", ".join(map(str, form.columns))


def of_term(batch: Batch, term: int | None) -> Batch:
    """Return the samples of one term as a batch of their own; None: the batch with all terms."""
    return batch if term is None else Batch((batch.parts[term],))
