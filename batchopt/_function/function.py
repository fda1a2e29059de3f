"""The function of one batch: f(X), df/dX and Hessian products of a module's loss, evaluated by workers."""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from batchopt._data.batches import Readings, read_batch
from batchopt._data.denominators import marks_of
from batchopt._data.epochs import Turn
from batchopt._data.forms import BatchForm, with_form
from batchopt._data.prefetch import Ahead, as_arguments, as_batch_of_terms
from batchopt._data.terms import Term, reweighed
from batchopt._function.counters import Counters
from batchopt._function.cut_check import compare, refuse_frequencies
from batchopt._function.nonfinite import explain
from batchopt._function.observer import Evaluated, Observer
from batchopt._function.observers import Observers
from batchopt._function.prepared import PreparedBatch, Rows, finish, rows_of, turns_of
from batchopt._function.repeat import LONGEST, Repeat
from batchopt._function.reporter import Reporter
from batchopt._function.settings import Settings
from batchopt._function.step import Step
from batchopt._function.trials import Trial
from batchopt._function.unread import with_denominators
from batchopt._function.workers import Workers
from batchopt._machine.ownership import Owner, exclusive, undisturbed
from batchopt._machine.threads import torch_threads
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.compression import DoesNotFit
from batchopt._mapreduce.plan import NEW, Plan, choose_chunk_size, follow, make_plan, plan_of
from batchopt._mapreduce.reduce import Whole, reduce_answers, weighed
from batchopt._mapreduce.results import common_form, forms_of
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flat_module import FlatModule
from batchopt._program.flatten import check_hooks
from batchopt.backends.base import Prepared
from batchopt.errors import BatchoptError, NonFiniteError, WorkerError, tell_rows
from batchopt_workers import faults
from batchopt_workers.batch import Batch
from batchopt_workers.evaluate import Program
from batchopt_workers.messages import Cut, Kind
from batchopt_workers.task import Task
from batchopt_workers.worker import Hook

T = TypeVar("T")


class Past(NamedTuple):
    """The counters, the results of the posthook in the last evaluation, and the number of the last one whose residuals
    count, where gradients are compressed. A step that fails puts back the record that it began with."""

    counters: Counters
    hook_results: list[Any]
    residuals: int = 0


class Planned(NamedTuple):
    """The plan of a batch of `size` samples, made or kept with these speeds."""

    size: int
    chunk_size: int | None
    speeds: Speeds
    plan: Plan


class BatchFunction:
    """Evaluates f of the loaded batch, and its derivatives, on workers. `BatchOptimizer` holds one and documents its
    methods for users."""

    def __init__(self, subject: FlatModule, settings: Settings, counters: Counters | None = None) -> None:
        """Starts the workers. Raises `WorkerStartError`; `WorkerError` if precode raises."""
        self.owner = self._owner = Owner()
        self.subject, self.settings = subject, settings
        self.workers = Workers(subject, settings)
        self._read: tuple[Any, Readings] | None = None  # how, as long as nothing changes
        self._form: tuple[Readings, BatchForm] | None = None  # of the batch that was read last
        self._terms = settings.terms
        self.verbose = settings.verbose if self.is_main else 0
        self._reporter = Reporter(self.verbose)
        self.observers = Observers([self._reporter] if self.verbose else [])
        self._checks_cut = settings.check_cut
        self._on_nonfinite = settings.on_nonfinite  # "keep": f is what it is
        self._step: Step | None = None
        self._repeat: Repeat | None = None  # the last evaluation
        self._planned: Planned | None = None  # last
        self._cuts = settings.chunk_size, settings.deterministic
        self._unlooked = 0  # the number of a step that was only evaluated by repeats
        self._number: int | None = None  # of the one that is made, if it has one already
        self._rows: Rows = lambda: None  # of the data, which the loaded batch has
        self._placed: Prepared | None = None  # where the workers can read it
        self._past = Past(counters or Counters(), [])
        self._goes_back_to: Past | None = None  # if the step that is made fails
        self._compresses = settings.compress is not None
        self._evaluation = 0  # the number of the one that runs, if gradients are compressed
        self._term_losses: tuple[float, ...] = ()  # in the last evaluation
        self._changes: torch.Tensor | None = None  # of buffers, in the step's last evaluation
        self._ended = False  # whether the module has them already
        self._keeps_outputs = False
        self._outputs: Any = None  # of the module, in the last evaluation
        self._closed = False

    # ---- what there is

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files; of several that do the same, one does."""
        return self.workers.backend.is_main

    @exclusive
    def once(self, function: Callable[[], T]) -> T:
        """What `function` returns, or raises, in the process that writes files."""
        return self.workers.backend.once(function)

    @property
    def past(self) -> Past:
        """The counters and the last hook results."""
        return self._past

    @property
    def readings(self) -> Readings:
        """How data becomes a batch, by the names of terms, with the criterion as it is now."""
        marks = marks_of(self.settings.criterion), self.workers.alone
        if self._read is None or self._read[0] != marks:
            device = None if self.workers.alone else self.subject.x.device
            self._read = marks, self.settings.readings(device)
        return self._read[1]

    @property
    def terms(self) -> dict[str, Term] | None:
        """The terms, with their present weights."""
        return self._terms

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each term in f, for the batch that is loaded next; where there are no terms, 1."""
        return (1.0,) if self._terms is None else tuple(term.weight for term in self._terms.values())

    @exclusive
    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use these with the batch that is loaded next."""
        self._terms = reweighed(self._terms, weights)

    def check_open(self) -> None:
        """Bring X up to date with the module. Raises `BatchoptError` after `close`, and where X cannot follow."""
        if self._closed:
            raise _closed()
        self.subject.follow()

    def without_bar(self) -> AbstractContextManager[None]:
        """The progress bar of evaluations rests in the body."""
        return self._reporter.without_bar()

    def follow(self) -> FlatModule:
        """The module, with X as it has it; after `close`, as it was then."""
        if not self._closed:
            self.subject.follow()
        return self.subject

    @property
    def parameters(self) -> torch.Tensor:
        """X, as the module has it."""
        return self.follow().x

    def ready(self) -> Step:
        """The step on the loaded batch, with X as the module has it now. Raises `ValueError` for a parameter with a
        hook, too."""
        if self._closed:
            raise _closed()
        self.subject.follow()
        check_hooks(self.subject.named)
        return self._step or self._loaded()

    def _loaded(self) -> Step:
        if self._step is None:
            raise BatchoptError("no batch was loaded: call load(inputs, targets) or step(inputs, targets)")
        return self._step

    # ---- batches

    @exclusive
    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Make this the batch of the evaluations to come."""
        if self._closed:
            raise _closed()
        if isinstance(inputs, PreparedBatch):
            inputs.check_alone(targets, options)
            self.begin(inputs.take(self), inputs.rows)
            inputs.finish()
        else:
            self.begin(self.prepare(inputs, targets, options))

    @undisturbed
    def prepare(self, inputs: Any, targets: Any, options: Any, ahead: bool = False) -> Prepared:
        """Read the batch, and bring it to where the workers can read it. `ahead`: while the present one is still
        needed; else that one is gone."""
        with self.observers.doing("read ahead" if ahead else "load"):
            batch = self._read_batch(inputs, targets, options)
            if not ahead:
                self.end_step()
                self._step = None
            self._placed = self.workers.backend.prepare(batch, ahead)
            return self._placed

    def _read_batch(self, inputs: Any, targets: Any, options: Any) -> Batch:
        """The batch: of the form of the one before, or else as it is read."""
        readings = self.readings
        if self._form is not None and self._form[0] is readings and options is None:
            batch = self._form[1].filled(inputs, targets, readings[None])
            if batch is not None:
                return batch
        batch = with_form(read_batch(inputs, targets, options, readings))
        self._form = None if batch.plain is None or None not in readings else (readings, batch.plain.form)
        return batch

    def begin(self, prepared: Prepared, rows: Rows = lambda: None) -> None:
        """Begin a step on what was prepared; `rows`: which samples of the data it has."""
        self._rows = rows
        self._begin(prepared if prepared.batch.plain is not None else self.weighed(prepared))

    def weighed(self, prepared: Prepared) -> Prepared:
        """The same, `with_denominators`."""
        batch = self.with_denominators(prepared.batch)
        return prepared if batch is prepared.batch else replace(prepared, batch=batch)

    def with_denominators(self, batch: Batch) -> Batch:
        """The same where all that means divide by is known; else a batch in which it is."""
        return with_denominators(batch, self.readings, self.carry_out, self.workers.backend)

    @undisturbed
    def _begin(self, prepared: Prepared) -> None:
        subject, workers = self.subject, self.workers
        subject.check()
        self.end_step()
        workers.grow(self._reporter.not_grown)
        with self.observers.doing("load"), undone_if_it_fails(self):
            self._step = None
            if prepared is not self._placed:  # another batch was brought there meanwhile
                prepared = self._placed = workers.backend.prepare(prepared.batch)
            subject.buffers.begin_step()
            self._ended = False
            weights, infos = self.weights, workers.infos
            workers.backend.load(prepared, weights)
            workers.leave_out_the_lost(infos)
            self._past = Past(self._past.counters.begun(), self._past.hook_results, self._past.residuals)
            number, batch, count = self._past.counters.steps, prepared.batch, len(infos)
            chunk_size = choose_chunk_size(batch.size, *self._cuts)
            plan = self._plan_of(batch.size, chunk_size)
            chunks = plan.cut.chunks
            refuse_frequencies(subject.module, count, batch, chunks)
            self._reporter.idle(batch.size, chunk_size and chunks, count)
            movable = chunks == 1 or not self._reporter.cut_matters(subject.module, chunks)
            # samples that change hands have to be read again; of fixed chunks those are few
            moves = movable and (chunk_size is not None or not batch.is_kept)
            self._step = Step(number, batch, weights, chunk_size, plan, moves)
            self._planned = Planned(batch.size, chunk_size, workers.speeds, plan)
            if movable and self._checks_cut and (count > 1 or chunks > 1):
                self._check_cut(self._step)

    def _plan_of(self, size: int, chunk_size: int | None) -> Plan:
        """That of the step before, as far as it fits: then evaluations may be repeated."""
        speeds, planned = self.workers.speeds, self._planned
        if planned is not None and (planned.size, planned.chunk_size) == (size, chunk_size):
            plan = planned.plan
            if planned.speeds is speeds and (plan.age >= NEW or len(plan.shares) == 1):
                return plan
            if len(plan.shares) == len(speeds.values) and math.isfinite(speeds.makespan(plan.samples())):
                return follow(plan, chunk_size, speeds)
        return make_plan(size, chunk_size, speeds)

    def _check_cut(self, step: Step) -> None:
        """Warn if the loss of a few samples depends on how they are cut; once, when a batch is cut for the first
        time."""
        workers, bounds = self.workers, step.plan.cut.bounds
        self._checks_cut = False
        largest, dtype = max(stop - start for start, stop in pairwise(bounds)), self.subject.x.dtype
        arguments = step.batch, self.readings, largest, workers.number, step.number, dtype
        with self.subject.keeping_gradients(), workers.without_hooks():
            found = workers.learning(lambda: compare(workers.backend, *arguments))
        self._reporter.cut_differs([difference for difference in found if difference.decided])

    @exclusive
    @undisturbed
    def calibrate(self) -> list[float]:
        """Time the workers on equal shares of the loaded batch; the speeds in samples per second."""
        step, workers = self.ready(), self.workers
        if not workers.speeds.fixed:
            plan = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(len(workers.infos)))
            with self._at_start(), workers.without_hooks():
                for _ in range(1 if workers.evaluations else 2):
                    answers = workers.evaluate(step._replace(plan=plan), Kind.EVALUATE)
                    workers.learn_from(answers, plan.samples())
            self._reporter.note("calibrated: %s samples/s", [round(speed) for speed in workers.speeds.relative])
        return list(workers.speeds.relative)

    def prepared(self, batches: Iterable[Any]) -> Iterator[PreparedBatch]:
        """Each of `batches`, placed; the next one is read and placed while the workers compute."""
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
        map: Callable[[], list[Answer]] | None = None,
        reduce: Callable[[Sequence[Answer]], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """f at X (0-dim, float64), and df/dX, by the two halves `map` and `reduce`: those below, or what overrides
        them."""
        owner = self._owner
        outer = owner.doing
        try:
            owner.doing = outer or "an evaluation"
            began = time.perf_counter()
            self.observers.begins()
            self._evaluation, self._number = 0, None
            try:
                if map is None and reduce is None and self._repeat is not None:
                    repeated = self._repeated(self._repeat, began)
                    if repeated is not None:
                        return repeated
                answers = (map or self.map)()
                mapped = time.perf_counter()
                faults.point("parent.reduce")
                loss = (reduce or self.reduce)(answers)
                self._repeat = self._repeat_of(answers) if map is None and reduce is None else None
            except BatchoptError as error:
                tell_rows(error, self._rows())
                answers, mapped, loss = [], time.perf_counter(), self._infinite(error)
            self._count(loss.item(), answers, began, mapped)
            return loss
        finally:
            owner.doing = outer

    def _repeat_of(self, answers: Sequence[Answer]) -> Repeat | None:
        """The evaluation that these answer, to be repeated next time, if the backend can."""
        which, longest = self.workers.backend.repeatable, max((answer.seconds for answer in answers), default=LONGEST)
        if which is None or longest >= LONGEST or not self.workers.are_known:
            return None
        return Repeat(self._loaded(), self.workers.speeds, which, answers, self.workers.infos)

    def _repeated(self, repeat: Repeat, began: float) -> torch.Tensor | None:
        """What `evaluate` returns, if the evaluation before can be repeated; None where it has to be ordered."""
        step, subject, workers = self.ready(), self.subject, self.workers
        usual = repeat.fits(step, workers.speeds) and not self._ended and self._on_nonfinite != "keep"
        if not usual or self._compresses or self._keeps_outputs or subject.buffers.is_written:
            return None
        self._repeat = None  # if anything is raised
        if step.number != repeat.step:  # of which this is the first evaluation
            self._unlooked = repeat.step = step.number
        self._number = workers.number()  # of the order, too, if it takes one
        found = workers.backend.repeat(repeat.which, self._number, step.number, repeat.seconds, self.observers.busy)
        if found is None:
            return None
        if repeat.drew and step.movable and step.chunk_size is None:  # as after an order
            self._step = step._replace(movable=False)
        mapped = time.perf_counter()
        if faults.hook is not None:
            faults.point("parent.reduce")
        whole = repeat.reduction.whole(found.losses, subject.renew_gradient())
        loss = weighed(whole.losses, step.weights)
        if not (whole.finite and math.isfinite(loss)):  # which the ordinary way explains
            self._number = None  # for sums were made where the workers have their own
            return None
        self._take_in(whole)
        self._outputs = None
        if self._past.hook_results or repeat.hook_results:
            self._past = self._past._replace(hook_results=[*repeat.hook_results])
        if repeat.took(found.times):
            self._repeat = repeat
        answers = repeat.answers(found) if self.observers.look else ()
        self._count(loss, answers, began, mapped)
        return torch.scalar_tensor(loss, dtype=torch.float64, device="cpu")

    def _count(self, loss: float, answers: Sequence[Answer], began: float, mapped: float) -> None:
        """An evaluation is over: count it, and tell who wants to know."""
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
    def map(self) -> list[Answer]:
        """Partial losses and gradients from every worker that had a share."""
        step = self.ready()
        if step.number != self._unlooked:  # else workers have not said yet whether random numbers are drawn
            step = self._step = step.followed(self.workers.speeds)
        self._planned = Planned(step.batch.size, step.chunk_size, self.workers.speeds, step.plan)
        self._outputs = None
        answers = self._evaluate(step, Kind.EVALUATE)
        self._unlooked = 0
        if self._keeps_outputs:
            self._outputs = self.put_together(answers, step.plan.cut, step.batch.size)
        self.workers.learn_from(answers, step.plan.samples())
        results = {chunk: found for answer in answers for chunk, found in answer.results.items()}
        in_order = [result for _, of_chunk in sorted(results.items()) for result in of_chunk]
        self._past = self._past._replace(hook_results=in_order)
        return answers

    def _evaluate(self, step: Step, kind: Kind) -> list[Answer]:
        """Evaluate as planned; where random numbers were drawn the chunks stay, for others would draw other ones."""
        with self._at_start():
            if self._compresses and kind is Kind.EVALUATE:
                answers = self._evaluate_compressed(step)
            else:
                number = self._number if kind is Kind.EVALUATE else None
                self._number = None
                answers = self.workers.evaluate(step, kind, self.observers.busy, number)
        if step.chunk_size is None and any(answer.drew for answer in answers):
            self._step = step._replace(movable=False)
        return answers

    def _evaluate_compressed(self, step: Step) -> list[Answer]:
        residuals = self._past.residuals, (self._goes_back_to or self._past).residuals
        try:
            answers, self._evaluation = self.workers.evaluate_compressed(step, *residuals, self.observers.busy)
        except DoesNotFit as error:
            counters, where = self._past.counters, step.batch.numbering.within(error.samples)
            number = counters.evaluations + 1
            raise NonFiniteError(str(error), None, error.samples, counters.steps, number, where) from None
        return answers

    def residuals(self) -> dict[int, torch.Tensor]:
        """What compression has left of gradients so far, of each part of the sum."""
        return self.workers.compressing.residuals(self._past.residuals) if self._compresses else {}

    def check_exact(self, what: str) -> None:
        """Raise `ValueError` where gradients are compressed, which `what` would be wrong with."""
        if self._compresses:
            raise ValueError(
                f"{what} is exact, or compares gradients with each other, and here they are compressed: build another "
                "BatchOptimizer without `compress` for it"
            )

    @undisturbed
    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Merge `answers` into f, which is returned, and df/dX."""
        step, subject = self._loaded(), self.subject
        whole = reduce_answers(answers, step.plan.cut.chunks, subject.renew_gradient())
        self._take_in(whole)
        loss = weighed(whole.losses, step.weights)
        finite = whole.finite and math.isfinite(loss)
        if not finite and self._on_nonfinite == "raise":
            self._changes = None
            raise self.not_finite(Kind.EVALUATE, step.plan.cut, step.batch)
        if self._ended:
            self.end_step()
        kept = finite or self._on_nonfinite == "keep"
        return torch.scalar_tensor(loss if kept else math.inf, dtype=torch.float64, device="cpu")

    def _take_in(self, whole: Whole) -> None:
        """Show what all chunks have found."""
        self.subject.show_gradients(whole.used)
        self._changes, self._term_losses = whole.changes.clone(), whole.losses

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """In the body f, and products, may be NaN or infinite, which is no error."""
        before, self._on_nonfinite = self._on_nonfinite, "keep"
        try:
            yield
        finally:
            self._on_nonfinite = before

    def _infinite(self, error: BatchoptError) -> torch.Tensor:
        """Infinity, where what the user's code raised means that; else raises it."""
        if not isinstance(error, WorkerError) or self.settings.kinds_as_infinite.isdisjoint(error.kinds):
            raise error
        step, subject, counters = self._loaded(), self.subject, self._past.counters
        self._changes = None
        if self.settings.on_nonfinite == "raise":
            chunk = bisect_right(step.plan.cut.bounds, error.samples.start) - 1
            number, what = counters.evaluations + 1, f"loss is none ({error.type_name})"
            raise NonFiniteError(what, chunk, error.samples, step.number, number, error.terms) from error
        subject.renew_gradient().fill_(math.nan)
        subject.show_gradients()
        self._term_losses = (math.inf,) * len(step.weights)
        return torch.scalar_tensor(math.inf, dtype=torch.float64, device="cpu")

    def not_finite(self, kind: Kind, cut: Cut, batch: Batch, what: str = "") -> Exception:
        """The error that says where it came from, and `what` it is if the kind of order does not tell."""
        workers, counters = self.workers, self._past.counters
        with workers.without_hooks(), self._at_start():
            return explain(workers.backend, cut, batch.numbering, workers.number, counters, kind, what)

    @exclusive
    @undisturbed
    def hvp(self, v: torch.Tensor) -> torch.Tensor:
        """The Hessian of f at X times `v`: a new tensor, shape `(n,)`, X's dtype."""
        step = self.ready()
        direction = torch.empty_like(self.subject.x).copy_(v.detach())
        if not bool(direction.isfinite().all()):
            return torch.full_like(direction, math.nan)
        with self.observers.doing("product"), self._owner.amid("a product"):
            self.workers.backend.set_direction(direction)
            answers = self._evaluate(step, Kind.MULTIPLY)
            product = torch.empty_like(self.subject.x)
            whole = reduce_answers(answers, step.plan.cut.chunks, product)
        if not whole.finite and self._on_nonfinite == "raise":
            raise self.not_finite(Kind.MULTIPLY, step.plan.cut, step.batch)
        self.count_products(1)
        return product

    def count_products(self, count: int) -> None:
        """So many more products of the Hessian were made."""
        counters = replace(self._past.counters, products=self._past.counters.products + count)
        self._past = self._past._replace(counters=counters)

    @exclusive
    @undisturbed
    def keep_outputs(self, keep: bool) -> None:
        """Whether the next evaluations keep what the module returns."""
        self.workers.backend.keep_outputs(keep)
        self._keeps_outputs = keep

    @property
    def keeps_outputs(self) -> bool:
        """Whether evaluations keep what the module returns."""
        return self._keeps_outputs

    def outputs(self) -> Any:
        """What the module returned in the last evaluation. Raises `BatchoptError` if nobody kept it."""
        self.check_open()
        if self._outputs is None:
            raise BatchoptError(
                "there are no outputs: set opt.keep_outputs = True before the batch is evaluated, or call "
                "opt.collect(lambda module, inputs, targets: module(inputs)), which takes a forward"
            )
        return self._outputs

    def put_together(self, answers: Sequence[Answer], cut: Cut, samples: int) -> Any:
        """The rows that the workers have written, in the order of samples, in the structure in which they were
        returned. Raises `ValueError` for chunks with different ones."""
        form = common_form(forms_of(answers), cut.bounds)
        if form.objects is not None:
            return form.objects
        return form.filled(self.workers.backend.collected(form.columns, samples))

    # ---- tasks

    @exclusive
    @undisturbed
    def carry_out(
        self,
        task: Task,
        batch: Batch,
        kind: Kind,
        use: Callable[[Sequence[Answer], Cut], T],
        cut: Cut | None = None,
    ) -> T:
        """`use` what the workers answer to orders of a task on `batch`, and its cut: either samples of the loaded
        batch, or (`task.aside`) other ones, cut so, if not as for evaluations. The loaded batch stays as it is.

        In the middle of a step (an optimizer's callback) the program is that of the step; else it is as the user has it
        now, and a batch that was loaded before a change of it is no longer loaded. Likewise the module's state: that of
        the step's start for f of the loaded batch and in the middle of a step, else as it is now, as for what the
        module returns in a mode that is not its own.
        """
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
                orders = plan.orders(workers.number(), self._past.counters.steps, kind)
                evaluate = partial(workers.backend.evaluate, plan.cut, orders, self.observers.busy)
                answers = evaluate() if task.writes else workers.learning(evaluate)
                workers.learn_from_task(answers)
                self.observers.worked(kind.name.lower(), answers, plan.cut.bounds)
                faults.point("parent.answers")
                return use(answers, plan.cut)
            finally:
                workers.backend.end_task()

    def _plan_of_task(self, task: Task, batch: Batch, cut: Cut | None) -> Plan:
        """The step's own where its whole batch is gone through, so that draws are those of the evaluations."""
        if not task.aside and len(self._loaded().batch.parts) == len(batch.parts):
            return self._loaded().plan
        speeds = self.workers.speeds_of_tasks
        if cut is not None:
            return plan_of(cut, speeds)
        chunk_size = choose_chunk_size(batch.size, self.settings.chunk_size, self.settings.deterministic)
        return make_plan(batch.size, chunk_size, speeds)

    # ---- what is undone

    @contextmanager
    def apart(self, what: str, counted: bool = False) -> Iterator[None]:
        """Batches loaded in the body belong to no step: afterwards the random draws go on as if there had been none,
        and so do the counters, unless evaluations are to be `counted` and nothing was raised. A batch has to be loaded
        again."""
        self.check_open()
        self.end_step()
        before = after = self._past
        try:
            with self.owner.amid(what):
                yield
            if counted:
                counters = replace(self._past.counters, steps=before.counters.steps)
                after = self._past._replace(counters=counters)
        finally:
            self._forget_batch()
            self._past = after

    @contextmanager
    def under_examination(self) -> Iterator[None]:
        """Evaluations in the body leave no trace, except that a batch has to be loaded again."""
        checks_cut, self._checks_cut = self._checks_cut, False
        compresses, self._compresses = self._compresses, False
        try:
            with self.apart("check()"):
                yield
        finally:
            self._checks_cut, self._compresses = checks_cut, compresses

    def end_step(self) -> None:
        """Take over the buffers as the step's last evaluation left them; does nothing the second time. More evaluations
        may follow, which start from where the step did."""
        if self._changes is not None:
            self.subject.buffers.take_over(self._changes)
            self._changes, self._ended = None, True

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        """For the body, the module's state is that of the step's start, also where the step has ended or the user has
        written it."""
        left = self._ended or self.subject.buffers.is_written
        with self.subject.buffers.at_start() if left else nullcontext():
            if left:
                self.workers.backend.restart_step()
            yield

    def drop_changes(self) -> None:
        """Leave the buffers as they were before the last evaluation."""
        self._changes = None

    def _forget_batch(self) -> None:
        self._step = self._changes = self._outputs = self._repeat = None

    def stepped(self, left: Trial | None) -> None:
        """An optimizer has made its step on the loaded batch; `left`: the evaluation at the parameters that it
        leaves."""
        counters = self._past.counters.stepped(self._loaded().batch.size)
        if left is not None:
            counters = replace(counters, loss=left.loss, terms=dict(left.terms))
        self._past = self._past._replace(counters=counters)

    def resume(
        self,
        counters: Counters,
        terms: dict[str, Term] | None,
        speeds: Sequence[float | None],
        residuals: Mapping[int, torch.Tensor],
    ) -> None:
        """Go on from these; from `speeds` if they are of as many workers. A batch has to be loaded anew."""
        number = 0
        if self._compresses and residuals:
            number = self.workers.number()
            self.workers.compressing.restore_residuals(number, residuals)
        elif residuals:
            warnings.warn(
                "the state is of a run with `compress`, and has what compression had left of gradients, which is "
                "dropped here: give the same `compress` to go on with the same bits",
                RuntimeWarning,
                stacklevel=3,
            )
        self._terms, self._past = terms, Past(counters, self._past.hook_results, number)
        self._planned = None
        self._forget_batch()
        if len(speeds) == len(self.workers.infos) and not self.workers.speeds.fixed:
            self.workers.set_speeds(Speeds(tuple(speeds)))

    # ---- for the doctor

    def load_in_chunks(self, least: int, inputs: Any, targets: Any, options: Any) -> tuple[int, int]:
        """Load the batch, cut into `least` chunks or more of a size that stays; returns the numbers of samples in all
        and in a chunk."""
        self.load(inputs, targets, options)
        step = self.ready()
        size = step.batch.size
        chunk_size = step.chunk_size or math.ceil(size / max(least, len(self.workers.infos)))
        self._step = step._replace(chunk_size=chunk_size, plan=make_plan(size, chunk_size, self.workers.speeds))
        return size, chunk_size

    def twin(self, program: Program, **changes: Any) -> BatchFunction:
        """The same function of another program, in this process, with the same draws in its first step."""
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

    # ---- workers

    @exclusive
    @undisturbed
    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these hooks from now on."""
        self.check_open()
        self.workers.set_hooks(prehook, posthook)

    @exclusive
    @undisturbed
    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on each worker; the values in rank order."""
        self.check_open()
        return self.workers.backend.run(function, args)

    @exclusive
    @undisturbed
    def resize(self, parallelize: int | str, speeds: Sequence[float] | None) -> None:
        """Have `parallelize` workers from now on; a batch has to be loaded anew."""
        self.check_open()

        def between_steps() -> None:
            self.end_step()
            self._step = self._placed = self._planned = self._repeat = None

        self.workers.resize(parallelize, speeds, between_steps)
        self.workers.backend.keep_outputs(self._keeps_outputs)

    def close(self) -> None:
        """End the workers, in the middle of another call soon after; X stays, in memory of this process alone."""
        if not self._owner.is_here or self._closed:
            return
        if self._owner.at_last(self._close):
            self.workers.backend.stop()
        else:
            self._close_now()

    @exclusive
    def _close_now(self) -> None:
        self._close()

    @undisturbed
    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.end_step()
            self._reporter.close()
            self.workers.backend.close()
            self._placed = self._outputs = self._repeat = None
            self.subject.leave()

    def __enter__(self) -> BatchFunction:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _closed() -> BatchoptError:
    return BatchoptError("this BatchOptimizer was closed: build a new one")


class undone_if_it_fails:
    """If the body raises, restore the counters and the buffers of a function; a batch has to be loaded again."""

    def __init__(self, function: BatchFunction) -> None:
        self._function = function
        self._before = function._past, function._goes_back_to, function._step, function._ended

    def __enter__(self) -> None:
        past, outer, *_ = self._before
        self._function._goes_back_to = outer or past

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        function, (past, outer, step, ended) = self._function, self._before
        try:
            if kind is not None:
                function._past = past
                has_begun = function._step is not step or not ended  # else it was over before: what it left stays
                if function._step is not None and has_begun and not function.subject.buffers.is_written:
                    function.subject.buffers.restore()
                function._forget_batch()
        finally:
            function._goes_back_to = outer


class ReadsAhead(Observer):
    """Fetches the next batch while the workers compute."""

    def __init__(self, ahead: Ahead[Any]) -> None:
        self._ahead = ahead

    def busy(self) -> None:
        with torch_threads(1):  # the workers have the cores
            self._ahead.fetch()
