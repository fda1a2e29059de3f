"""The function of one batch: f(X), df/dX and Hessian products of a module's loss, evaluated by workers."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from batchopt._data.batches import Readings
from batchopt._data.epochs import Turn
from batchopt._data.prefetch import Ahead, as_arguments, as_batch_of_terms
from batchopt._function.checks import Difference, compare, explain
from batchopt._function.loader import BatchLoader, Past, Planned, closed
from batchopt._function.observer import Evaluated, Observer
from batchopt._function.prepared import PreparedBatch, Rows, finish, rows_of, turns_of, with_denominators
from batchopt._function.settings import Settings
from batchopt._function.step import Counters, Step
from batchopt._machine.cores import torch_threads
from batchopt._machine.ownership import exclusive, undisturbed
from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt._mapreduce.compression import DoesNotFit
from batchopt._mapreduce.plan import Plan, choose_chunk_size, make_plan, plan_of
from batchopt._mapreduce.reduce import Answers, Whole, reduce_answers, weighed
from batchopt._program.flat_module import FlatModule, Gradient
from batchopt.backends.base import Prepared
from batchopt.errors import BatchoptError, NonFiniteError, WorkerError, tell_rows
from batchopt_workers.data.batch import Batch, Columns, Part
from batchopt_workers.map.program import Program
from batchopt_workers.map.weighting import Weighting
from batchopt_workers.process import faults
from batchopt_workers.process.messages import Cut, Kind
from batchopt_workers.tasks.cut_losses import CutLosses
from batchopt_workers.tasks.task import Task

T = TypeVar("T")


class BatchFunction(BatchLoader):
    """Evaluates f of the loaded batch, and its derivatives, on workers; see `BatchOptimizer` for its methods."""

    def __init__(self, subject: FlatModule, settings: Settings, counters: Counters | None = None) -> None:
        """Start the workers. Raises `WorkerStartError`; `WorkerError` if precode raises."""
        super().__init__(subject, settings, counters)
        self._on_nonfinite = settings.on_nonfinite  # "keep": f may be NaN or infinite
        self._evaluation = 0  # the number of the current one, if gradients are compressed
        self._term_losses: tuple[float, ...] = ()  # in the last evaluation
        self._rows: Rows = lambda: None  # of the data, in the loaded batch

    # ---- batches

    @exclusive
    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Load the batch that the next evaluations use."""
        if self._closed:
            raise closed()
        if isinstance(inputs, PreparedBatch):
            inputs.check_alone(targets, options)
            self.begin(inputs.take(self), inputs.rows)
            inputs.finish()
        else:
            self.begin(self.prepare(inputs, targets, options))

    def begin(self, prepared: Prepared, rows: Rows = lambda: None) -> None:
        """Begin a step on a prepared batch; `rows` returns the indices of its samples in the data."""
        self._rows = rows
        self._begin(prepared if prepared.batch.plain is not None else self.weighed(prepared))
        if self._checks_cut and self._step is not None and len(self._step.plan.cut.bounds) > 2:
            self._check_cut(self._step.plan.cut)

    def _check_cut(self, cut: Cut) -> None:
        """Warn if the loss of a few samples depends on how they are cut; once, when a batch is first cut."""
        if not self._reporter.cut_matters(self.subject.module, cut.chunks):
            self._checks_cut = False
            found = self.cut_differences(max(stop - start for start, stop in pairwise(cut.bounds)))
            self._reporter.cut_differs([difference for difference in found if difference.decided])

    def cut_differences(self, largest: int) -> list[Difference]:
        """Return the terms of the loaded batch whose loss depends on how it is cut, as far as samples of the `largest`
        chunk show."""
        dtype = self.subject.x.dtype

        def losses(of: CutLosses, rows: list[tuple[int, int]]) -> torch.Tensor:
            part = Part(Columns(torch.tensor(rows)), None, None, Weighting("mean", len(rows)))
            task, cut = Task(of, aside=True), Cut((0, len(rows)))

            def gathered(answers: Sequence[Answer], cut: Cut) -> torch.Tensor:
                found: torch.Tensor = self.put_together(answers, cut, len(rows))
                return found

            return self._carry_out(task, Batch((part,)), Kind.COLLECT, gathered, cut)

        with self._owner.amid("a comparison of cuts"), self.subject.keeping_gradients(), self.workers.without_hooks():
            return compare(losses, self._loaded().batch, self.readings, largest, dtype)

    def weighed(self, prepared: Prepared) -> Prepared:
        """Return the prepared batch with its normalisers known."""
        batch = self.with_denominators(prepared.batch)
        return prepared if batch is prepared.batch else replace(prepared, batch=batch)

    def with_denominators(self, batch: Batch) -> Batch:
        """Return the batch, or a copy with all normalisers of its means known."""
        return with_denominators(batch, self.readings, self.carry_out, self.workers.backend)

    def prepared(self, batches: Iterable[Any]) -> Generator[PreparedBatch, None, None]:
        """Yield each of `batches`, prepared; the next one is read and prepared while the workers compute."""
        read = as_arguments if self._terms is None else as_batch_of_terms

        def prepare(turn: Turn) -> tuple[Turn, Prepared, Readings]:
            readings = self.readings
            return turn, self.prepare(*read(turn.batch), ahead=True), readings

        ahead = Ahead(turns_of(batches), prepare)
        for turn, prepared, readings in ahead:
            of_turn = partial(finish, batches, turn), partial(rows_of, batches, turn)
            batch = PreparedBatch(self, prepared, readings, *of_turn)
            with self.observers.including(ReadsAhead(ahead)):
                try:
                    yield batch
                finally:
                    batch.expire()
            batch.finish()

    # ---- evaluations

    @exclusive
    @undisturbed
    def evaluate(
        self,
        map: Callable[[], Sequence[Answer]] | None = None,
        reduce: Callable[[Sequence[Answer]], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return f at X (0-dim, float64) and set df/dX, by `map` and `reduce` or what overrides them."""
        owner = self._owner
        outer = owner.doing
        try:
            owner.doing = outer or "an evaluation"
            began = time.perf_counter()
            self.observers.begins()
            self._evaluation = 0
            try:
                # only where nothing else looks at the answers may the gradient be written to its place at once
                into = self.subject.renew_gradient() if map is None and reduce is None else None
                answers: Sequence[Answer] = self._map(into) if map is None else map()
                mapped = time.perf_counter()
                if faults.hook is not None:
                    faults.point("parent.reduce")
                loss = (reduce or self.reduce)(answers)
            except BatchoptError as error:
                tell_rows(error, self._rows())
                answers, mapped, loss = [], time.perf_counter(), self._infinite(error)
            self._count(loss.item(), answers, began, mapped)
            return loss
        finally:
            owner.doing = outer

    def _count(self, loss: float, answers: Sequence[Answer], began: float, mapped: float) -> None:
        """Count a finished evaluation and notify the observers."""
        terms = dict(zip(self._terms, self._term_losses, strict=False)) if self._terms else {}
        counters = self._past.counters.evaluated(loss, terms)
        self._past = Past(counters, self._past.hook_results, self._evaluation or self._past.residuals)
        if not self.observers.follow:
            return
        step = self._step or self._loaded()
        number, batch, bounds = counters.evaluations, counters.batches + 1, step.plan.cut.bounds
        ended = time.perf_counter()
        self.observers.evaluated(Evaluated(number, batch, loss, terms, answers, bounds, began, mapped, ended))

    @undisturbed
    def map(self) -> Sequence[Answer]:
        """Return partial losses and gradients from every worker that had a share."""
        return self._map(None)

    def _map(self, into: Gradient | None) -> Answers:
        step = self.ready()
        if step.movable:
            step = self._step = step.followed(self.workers.speeds)
        self._planned = Planned(step.batch.size, step.chunk_size, self.workers.speeds, step.plan)
        self._outputs = None
        with self._at_start():
            if self._compresses:
                answers = self._evaluate_compressed(step)
            else:
                answers = self.workers.evaluate(step, self.observers.busy, into)
        if step.movable and step.chunk_size is None and answers.pattern.drew:  # other chunks would draw others
            self._step = step._replace(movable=False)
        if self._keeps_outputs:
            self._outputs = self.put_together(answers, step.plan.cut, step.batch.size)
        self.workers.learn_from(answers, step.plan)
        if self._past.hook_results or answers.pattern.hook_results:
            self._past = self._past._replace(hook_results=[*answers.pattern.hook_results])
        return answers

    def _evaluate_compressed(self, step: Step) -> Answers:
        residuals = self._past.residuals, (self._goes_back_to or self._past).residuals
        try:
            answers, self._evaluation = self.workers.evaluate_compressed(step, *residuals, self.observers.busy)
        except DoesNotFit as error:
            counters, where = self._past.counters, step.batch.numbering.within(error.samples)
            number = counters.evaluations + 1
            raise NonFiniteError(str(error), None, error.samples, counters.steps, number, where) from None
        return answers

    def residuals(self) -> dict[int, torch.Tensor]:
        """Return the compression residuals of the gradients so far, for each part of the sum."""
        return self.workers.compressing.residuals(self._past.residuals) if self._compresses else {}

    def check_exact(self, what: str) -> None:
        """Raise `ValueError` where gradients are compressed, since `what` needs exact ones."""
        if self._compresses:
            raise ValueError(
                f"{what} is exact, or compares gradients with each other, and here they are compressed: build another "
                "BatchOptimizer without `compress` for it"
            )

    @undisturbed
    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Merge `answers` into df/dX and f, which is returned."""
        step, subject = self._loaded(), self.subject
        whole = reduce_answers(answers, step.plan.cut.chunks, subject.renew_gradient().vector)
        self._take_in(whole)
        loss = weighed(whole.losses, step.weights)
        finite = whole.finite and math.isfinite(loss)
        if not finite and self.refuses_nonfinite:
            self._changes = None
            raise self.not_finite(Kind.EVALUATE, step.plan.cut, step.batch)
        if self._ended:
            self.end_step()
        kept = finite or self._on_nonfinite == "keep"
        return torch.scalar_tensor(loss if kept else math.inf, dtype=torch.float64, device="cpu")

    def _take_in(self, whole: Whole) -> None:
        """Set the gradients, buffer changes and term losses of all chunks."""
        self.subject.show_gradients(whole.used)
        self._changes, self._term_losses = whole.changes.clone(), whole.losses

    @property
    def refuses_nonfinite(self) -> bool:
        """Tell whether what is NaN or infinite is an error."""
        return self._on_nonfinite == "raise"

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Let f and products be NaN or infinite in the body, without an error."""
        before, self._on_nonfinite = self._on_nonfinite, "keep"
        try:
            yield
        finally:
            self._on_nonfinite = before

    def _infinite(self, error: BatchoptError) -> torch.Tensor:
        """Return infinity if the exception in the user's code means that; else raise it."""
        if not isinstance(error, WorkerError) or self.settings.kinds_as_infinite.isdisjoint(error.kinds):
            raise error
        step, subject, counters = self._loaded(), self.subject, self._past.counters
        self._changes = None
        if self.settings.on_nonfinite == "raise":
            chunk = bisect_right(step.plan.cut.bounds, error.samples.start) - 1
            number, what = counters.evaluations + 1, f"the loss is undefined ({error.type_name})"
            raise NonFiniteError(what, chunk, error.samples, step.number, number, error.terms) from error
        subject.renew_gradient().vector.fill_(math.nan)
        subject.show_gradients()
        self._term_losses = (math.inf,) * len(step.weights)
        return torch.scalar_tensor(math.inf, dtype=torch.float64, device="cpu")

    def not_finite(self, kind: Kind, cut: Cut, batch: Batch, what: str = "gradient") -> Exception:
        """Return the error that locates the origin of a non-finite result, described by `what` or the kind of order."""
        workers, counters = self.workers, self._past.counters
        with workers.without_hooks(), self._at_start():
            return explain(workers.backend, cut, batch.numbering, workers.number, counters, kind, what)

    def count_products(self, count: int) -> None:
        """Count `count` more Hessian products."""
        counters = replace(self._past.counters, products=self._past.counters.products + count)
        self._past = self._past._replace(counters=counters)

    @exclusive
    @undisturbed
    def keep_outputs(self, keep: bool) -> None:
        """Set whether the next evaluations keep the module's outputs."""
        self.workers.backend.keep_outputs(keep)
        self._keeps_outputs = keep

    @property
    def keeps_outputs(self) -> bool:
        """Tell whether evaluations keep the module's outputs."""
        return self._keeps_outputs

    def outputs(self) -> Any:
        """Return the module's outputs in the last evaluation. Raises `BatchoptError` if they were not kept."""
        self.check_open()
        if self._outputs is None:
            raise BatchoptError(
                "there are no outputs: set opt.keep_outputs = True before the batch is evaluated, or call "
                "opt.collect(lambda module, inputs, targets: module(inputs)), which takes a forward"
            )
        return self._outputs

    def put_together(self, answers: Sequence[Answer], cut: Cut, samples: int) -> Any:
        """Return the rows written by the workers, in sample order, in the structure in which they were returned. Raises
        `ValueError` if chunks returned different structures."""
        form = common_form(forms_of(answers), cut.bounds)
        if form.objects is not None:
            return form.objects
        return form.filled(self.workers.backend.collected(form.columns, samples))

    # ---- tasks

    @exclusive
    def carry_out(
        self,
        task: Task,
        batch: Batch,
        kind: Kind,
        use: Callable[[Sequence[Answer], Cut], T],
        cut: Cut | None = None,
    ) -> T:
        """Order a task on `batch` and return `use(answers, cut)`.

        The samples are those of the loaded batch or (`task.aside`) others, cut as given or else as for evaluations. The
        loaded batch is kept.

        In the middle of a step (in an optimizer's callback) the program is that of the step. Otherwise it is the
        current one, and a batch that was loaded before a change of it is unloaded. Likewise the module's state is that
        of the step's start for f of the loaded batch and in the middle of a step, else the current one, also for
        outputs in a mode other than the module's own.
        """
        return self._carry_out(task, batch, kind, use, cut)

    @undisturbed
    def _carry_out(
        self, task: Task, batch: Batch, kind: Kind, use: Callable[[Sequence[Answer], Cut], T], cut: Cut | None
    ) -> T:
        self.check_open()
        now = task.aside and not task.whole and not self.owner.is_amid
        if now:
            self.subject.check()
            self.end_step()
        is_f = task.whole or (task.train is None and not task.aside)
        of_f = self._step is not None and (self.owner.is_amid or is_f)
        workers, state = self.workers, self._at_start() if of_f else self.subject.buffers.as_now()
        with state, self.observers.doing(kind.name.lower()), self.owner.amid(f"a call of {kind.name.lower()}()"):
            try:
                if workers.backend.begin_task(task, batch if task.aside else None, follow=now):
                    self._forget_batch()
                plan = self._plan_of_task(task, batch, cut)
                order = plan.order(workers.number(), self._past.counters.steps, kind)
                evaluate = partial(workers.backend.evaluate, plan.cut, order, plan.runs, self.observers.busy)
                answers = evaluate() if task.writes else workers.learning(evaluate)
                workers.learn_from_task(answers)
                self.observers.worked(kind.name.lower(), answers, plan.cut.bounds)
                faults.point("parent.answers")
                return use(answers, plan.cut)
            finally:
                workers.backend.end_task()

    def _plan_of_task(self, task: Task, batch: Batch, cut: Cut | None) -> Plan:
        """Return the step's plan for all terms of its batch, so that draws match its evaluations; else a new plan."""
        if not task.aside and len(self._loaded().batch.parts) == len(batch.parts):
            return self._loaded().plan
        speeds = self.workers.speeds_of_tasks
        if cut is not None:
            return plan_of(cut, speeds)
        chunk_size = choose_chunk_size(batch.size, self.settings.chunk_size, self.settings.deterministic)
        return make_plan(batch.size, chunk_size, speeds)

    def settle(self) -> None:
        """Keep the number of workers from now on, if it is chosen automatically: they may have state of the user's."""

    @property
    def choice(self) -> Mapping[str, Any] | None:
        """The number of workers and threads that was chosen automatically, as plain data; None if there is none."""
        return None

    def arrange(self, choice: Mapping[str, Any]) -> None:
        """Use the number of workers and threads that another run has chosen, if it is chosen automatically."""

    def twin(self, program: Program, **changes: Any) -> BatchFunction:
        """Return the function of another program, in this process, with the same draws in its first step."""
        serial: dict[str, Any] = {
            "backend": "serial",
            "parallelize": 1,
            "speeds": None,
            "devices": None,
            "options": {},
            "precode": None,
            "verbose": 0,
            "check_cut": False,
            "terms": self._terms,
            "compress": None,
        }
        settings = replace(self.settings, **serial).having(program)
        counters = Counters(steps=self._past.counters.steps - 1)
        return BatchFunction(FlatModule(program.module), replace(settings, **changes), counters)


class ReadsAhead(Observer):
    """Fetches the next batch while the workers compute."""

    def __init__(self, ahead: Ahead[Any]) -> None:
        self._ahead = ahead

    def busy(self) -> None:
        with torch_threads(1):  # the workers have the cores
            self._ahead.fetch()
