"""The function of one batch, evaluated by workers. f(X) and df/dX pass through seven functions:

    BatchReader.read(inputs, targets)    _engine/reader.py               Batch: the samples, and what weighs them
    Engine.load                          here                            Step: batch, plan, start of the buffers
    Workers.plan(size, chunk_size)       _engine/workers.py              Plan: the cut, and each worker's share
    Backend.evaluate(cut, order, runs)   backends/                       Answers: partial sums, times, results
    run(walk, work, loaded, order)       workers, evaluate/work.py       the only loop over chunks, in each worker
    reduce_answers(answers, chunks)      _mapreduce/reduce.py            f, df/dX, changes of buffers
    Engine.count(loss, answers)          here                            Past: counters; observers; policies

Tasks, functions of the batch other than f, pass through the third to the fifth, by `run_task`.

What must hold, and why:

- Step and Past are immutable, and replaced as a whole: to undo is to put them back, and an interrupt between any two
  lines finds the one or the other.
- All evaluations of a step are of one function: they start from its buffers, with its draws. What they make of the
  buffers is in the step until it ends, and so never in the module while an optimizer may still go back.
- Nothing here belongs to a backend: what workers have is known to `Workers`, which may differ after any call.
- Methods that work are `undisturbed`: what runs meanwhile (hooks, signal handlers) is refused, as it would see half of
  a change.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from batchopt._data.batches import BatchSpecs
from batchopt._engine.checks import locate_nonfinite, refuse_cut
from batchopt._engine.compilation import DIFFERS, Abandoned
from batchopt._engine.observer import Evaluated
from batchopt._engine.observers import Observers
from batchopt._engine.policies import Policies
from batchopt._engine.prepared import PreparedBatch, with_denominators
from batchopt._engine.reader import BatchReader
from batchopt._engine.reporter import warn
from batchopt._engine.search import Way
from batchopt._engine.settings import Settings
from batchopt._engine.step import Counters, Found, Indices, Past, Rules, Step
from batchopt._engine.undo import Undo
from batchopt._engine.workers import Workers
from batchopt._machine.ownership import Owner, exclusive, sole, undisturbed
from batchopt._mapreduce.answers import Answer, common_form, forms_of
from batchopt._mapreduce.plan import Plan, choose_chunk_size, make_plan, plan_of
from batchopt._mapreduce.reduce import Answers, reduce_answers, weighed
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flat_module import FlatModule, Gradient
from batchopt._program.flatten import check_hooks
from batchopt._program.frequencies import refuse_frequencies
from batchopt.backends.base import Prepared
from batchopt.backends.nodes.compression import DoesNotFit
from batchopt.errors import BatchoptError, NonFiniteError, WorkerError, explain
from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.program import Hook
from batchopt_workers.functions.task import Task
from batchopt_workers.life import faults
from batchopt_workers.wire.orders import Cut, Kind

T = TypeVar("T")


class Engine:
    """Evaluates f of the loaded batch, and its derivatives, on workers; see `BatchOptimizer` for its methods."""

    def __init__(self, subject: FlatModule, settings: Settings, counters: Counters | None = None) -> None:
        """Start the workers. Raises `WorkerStartError`; `WorkerError` if precode raises."""
        self._owner = Owner()
        self.subject, self.settings = subject, settings
        self.observers = Observers(settings.verbose)  # first, since slow starts are reported
        self.trials: list[Found | None] | None = None  # evaluations of the present step; None: one that raised
        try:
            self.workers = Workers(subject, settings)
        except BaseException:
            self.observers.reporter.close()
            raise
        if not self.workers.backend.is_main:
            self.observers.report(0)
        self.reader = BatchReader(settings, self.workers, subject.x.device)
        self.rules = Rules(settings.on_nonfinite, settings.compress is not None, settings.check_cut)
        self.past = Past(counters or Counters(), [])
        self.step: Step | None = None
        self.begun: Past | None = None  # that with which the outermost attempt began that is going on
        self.policies = Policies.of(self)

    # ---- state

    @property
    def owner(self) -> Owner:
        """The owner, to which one caller at a time belongs."""
        return self._owner

    @property
    def specs(self) -> BatchSpecs:
        """The rules by which data becomes a batch, by term name, with the current criterion."""
        return self.reader.specs

    def resync(self) -> None:
        """Bring X up to date with the module. Raises `BatchoptError` after `close`, and what `FlatModule.resync`
        raises."""
        if self.workers.closed:
            raise closed()
        self.subject.resync()

    def synced(self) -> FlatModule:
        """Return the module with X up to date; after `close`, as it was then."""
        if not self.workers.closed:
            self.subject.resync()
        return self.subject

    @property
    def parameters(self) -> torch.Tensor:
        """X, up to date with the module."""
        return self.synced().x

    def current_step(self) -> Step:
        """Return the step on the loaded batch, with X up to date. Raises `ValueError` for a parameter with a hook, too,
        which would only run in this process."""
        if self.workers.closed:
            raise closed()
        if self.subject.resync():
            check_hooks(self.subject.named)
        return self.step or self.loaded()

    def loaded(self) -> Step:
        """Return the step on the loaded batch. Raises `BatchoptError` if there is none."""
        if self.step is None:
            raise BatchoptError("no batch was loaded: call load(inputs, targets) or step(inputs, targets)")
        return self.step

    def step_again(self) -> None:
        """Make another step on the loaded batch, which its buffers count too."""
        self.step = self.loaded()._replace(ended=False)

    # ---- batches

    @sole
    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Load the batch that the next evaluations use."""
        if self.workers.closed:
            raise closed()
        if isinstance(inputs, PreparedBatch):
            inputs.check_alone(targets, options)
            self._begin(inputs.take(self), inputs.rows)
            inputs.finish()
        else:
            began = time.perf_counter()
            batch = self.reader.read(inputs, targets, options)
            self.end_step()
            self.step = None  # also if the new batch cannot be placed
            prepared = self.workers.prepare(batch)
            self.observers.did("load", began)
            self._begin(prepared)

    @undisturbed
    def prepare_ahead(self, inputs: Any, targets: Any, options: Any) -> Prepared:
        """Read a batch, and place it where workers can read it; the loaded one stays."""
        began = time.perf_counter()
        prepared = self.workers.prepare(self.reader.read(inputs, targets, options), ahead=True)
        self.observers.did("read ahead", began)
        return prepared

    def _begin(self, prepared: Prepared, rows: Indices = lambda: None) -> None:
        """Begin a step on a prepared batch; `rows` returns the indices of its samples in the data."""
        began = time.perf_counter()
        if prepared.batch.plain is None:
            prepared = self.weighed(prepared, self.run_task_amid)
        subject, workers, batch = self.subject, self.workers, prepared.batch
        subject.check()
        if self.step is not None:
            self.end_step()
        reporter = self.observers.reporter
        workers.grow(reporter.not_grown)
        with Undo(self, "load"):
            self.step = None
            subject.buffers.begin_step()
            weights = self.reader.weights
            count = workers.load(prepared, weights)
            counters, *others = self.past
            self.past = Past(counters.begun(), *others)
            given = self.rules.chunk_size or self.policies.size_for(batch.size, self.settings.chunk_size)
            chunk_size = choose_chunk_size(batch.size, given, self.settings.deterministic)
            plan = workers.plan(batch.size, chunk_size)
            chunks = plan.cut.chunks
            refuse_frequencies(subject.module, count, batch, chunks)
            deals = batch.size < count and self.settings.by_differences(subject.module)
            if count > 1 and not deals:
                reporter.idle(batch.size, chunk_size and chunks, count)
            movable = chunks == 1 or not reporter.cut_matters(subject.module, chunks)
            # samples that move to another worker are read again; with fixed chunks those are few
            moves = movable and (chunk_size is not None or not batch.is_kept)
            self.step = Step(self.past.counters.steps, batch, weights, chunk_size, plan, moves, rows, deals)
        if self.rules.adapts:
            self.policies.loaded(self, batch.size, time.perf_counter() - began)
        if self.rules.checks_cut and len(plan.cut.bounds) > 2:
            self._check_cut(plan.cut)

    begin = sole(_begin)

    def _check_cut(self, cut: Cut) -> None:
        """Refuse a batch of which a few samples have a loss that depends on how they are cut; until once it did not."""
        if not self.observers.reporter.cut_matters(self.subject.module, cut.chunks):
            try:
                refuse_cut(self, max(stop - start for start, stop in pairwise(cut.bounds)))
            except ValueError:
                self.step = None
                raise
            self.rules = self.rules._replace(checks_cut=False)

    def weighed(self, prepared: Prepared, run_task: Callable[..., torch.Tensor] | None = None) -> Prepared:
        """Return the prepared batch with all normalisers of its means known."""
        batch = with_denominators(self, prepared.batch, run_task or self.run_task)
        return prepared if batch is prepared.batch else replace(prepared, batch=batch)

    # ---- evaluations

    @sole
    def evaluate(
        self,
        map: Callable[[], Sequence[Answer]] | None = None,
        reduce: Callable[[Sequence[Answer]], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return f at X (0-dim, float64) and set df/dX, by `map` and `reduce` or what overrides them."""
        if self.rules.adapts and any(self.policies):
            self.policies.before(self)
        owner, began = self._owner, time.perf_counter()
        outer = owner.doing
        try:
            owner.doing = outer or "an evaluation"
            for observer in self.observers:
                observer.begins()
            if self.trials is not None:
                self.trials.append(None)
            try:
                answers: Sequence[Answer]
                # Only where nothing else looks at the answers may the gradient be written to its place at once.
                into = self.subject.renew_gradient() if map is None and reduce is None else None
                if into is not None:
                    owner.running = (*owner.running, "map", "reduce")  # not to be called meanwhile, as if they were
                answers = self._map(into) if map is None else map()
                mapped = time.perf_counter()
                if faults.hook is not None:
                    faults.point("parent.reduce")
                loss = self._reduce(answers, into) if reduce is None else reduce(answers)
            except BatchoptError as error:
                if self.step is not None:
                    rows, settings = self.step.rows(), self.settings
                    explain(error, self.step.batch, rows, settings.loss_fns, settings.criterion, self.subject.x.dtype)
                answers, mapped, loss = [], time.perf_counter(), self._infinite(error)
            self.count(loss.item(), answers, began, mapped)
            return loss
        finally:
            owner.doing = outer

    def count(self, loss: float, answers: Sequence[Answer], began: float, mapped: float) -> None:
        """Count a finished evaluation and notify the observers."""
        step, past, names = self.step or self.loaded(), self.past, self.reader.terms
        terms = dict(zip(names, step.losses, strict=False)) if names else {}
        counters = past.counters.evaluated(loss, terms)
        self.past = Past(counters, *past[1:])
        if self.observers:
            number, batch, bounds = counters.evaluations, counters.batches + 1, step.plan.cut.bounds
            ended = time.perf_counter()
            found = Evaluated(number, batch, loss, terms, answers, bounds, began, mapped, ended)
            for observer in self.observers:
                observer.evaluated(found)
        if self.trials is not None:
            self.trials[-1] = Found(loss, terms)
        if self.rules.adapts and any(self.policies):
            self.policies.took(self, time.perf_counter() - began)

    @undisturbed
    def map(self) -> Sequence[Answer]:
        """Return partial losses and gradients from every worker that had a share."""
        return self._map(None)

    def _map(self, into: Gradient | None) -> Answers:
        step, workers, past = self.current_step(), self.workers, self.past
        plan = workers.replan(step)
        if plan is not step.plan:
            self.step = step = step._replace(plan=plan)
        if past.outputs is not None:
            self.past = past = past._replace(outputs=None)
        if self.subject.buffers.size and self.subject.buffers.is_written:
            self.subject.buffers.begin_step()  # what the user has written counts from here on
        while True:
            try:
                busy = self.observers.busy if self.observers else None
                answers = workers.evaluate(step, busy, into, self.rules.compresses)
                break
            except DoesNotFit as error:
                counters, where = self.past.counters, step.batch.numbering.within(error.samples)
                now = counters.steps, counters.evaluations + 1
                raise NonFiniteError(str(error), None, error.samples, *now, where) from None
            except WorkerError as error:
                if error.kinds[:1] == DIFFERS:
                    self._abandon(error)  # and now without it
                elif not self.policies.shrinks(self, error, plan.cut):
                    raise
                step = self.loaded()
                plan = step.plan
        pattern = answers.pattern
        if pattern.drew:
            self._keep_chunks(plan)
        workers.learn_from(answers, plan)
        if workers.mode.outputs or past.hook_results or pattern.hook_results:
            outputs = self.put_together(answers, plan.cut, step.batch.size) if workers.mode.outputs else None
            self.past = past._replace(hook_results=[*pattern.hook_results], outputs=outputs)
        return answers

    def _abandon(self, error: WorkerError) -> None:
        """Evaluate eagerly from now on, because a shortcut has found something else. Raises `Abandoned` in a step in
        which evaluations before went by it."""
        compilation = self.policies.compilation
        if compilation is not None:
            compilation.stop(self, error)
        what = "recorded" if compilation is None else "compiled"
        warn(
            f"a {what} evaluation found something else than an eager one ({error.message}): evaluations are eager from "
            "here, and the step is made anew; does the loss depend on something that the module, the criterion and the "
            "batch do not hold?"
        )
        if self.begun is not None and self.past.counters.evaluations > self.begun.counters.evaluations:
            raise Abandoned(f"a {what} evaluation found something else than an eager one") from error

    def cut_into(self, chunk_size: int | None) -> None:
        """Evaluate the loaded batch in chunks of this size from now on, as the same step."""
        step = self.loaded()
        self.step = step._replace(chunk_size=chunk_size, plan=self.workers.plan(step.batch.size, chunk_size))

    def _keep_chunks(self, plan: Plan) -> None:
        """Let the step's chunks not move any more, as numbers were drawn: other chunks would draw others."""
        step = self.step
        if step is not None and plan is step.plan and not step.drew:
            self.step = step._replace(movable=step.movable and step.chunk_size is not None, drew=True)

    @undisturbed
    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Merge `answers` into df/dX and f, which is returned."""
        return self._reduce(answers, None)

    def _reduce(self, answers: Sequence[Answer], into: Gradient | None) -> torch.Tensor:
        step, rules, subject = self.step or self.loaded(), self.rules, self.subject
        whole = reduce_answers(answers, step.plan.cut.chunks, (into or subject.renew_gradient()).vector)
        subject.show_gradients(whole.used)
        changes = whole.changes.clone() if whole.changes.shape[0] else None  # of a module without state
        self.step = Step(*step[:8], whole.losses, changes, *step[10:])
        loss = weighed(whole.losses, step.weights)
        finite = whole.finite and math.isfinite(loss)
        if not finite and rules.on_nonfinite == "raise":
            self.step = step._replace(changes=None)
            raise locate_nonfinite(self, Kind.EVALUATE, step.plan.cut, step.batch)
        if step.ended:
            self.step = self.step._replace(changes=None)
        kept = finite or rules.on_nonfinite == "keep"
        return torch.scalar_tensor(loss if kept else math.inf, dtype=torch.float64, device="cpu")

    def _infinite(self, error: BatchoptError) -> torch.Tensor:
        """Return infinity if the exception in the user's code means that; else raise it."""
        if not isinstance(error, WorkerError) or self.settings.kinds_as_infinite.isdisjoint(error.kinds):
            raise error
        step, subject, counters = self.loaded(), self.subject, self.past.counters
        self.step = step._replace(losses=(math.inf,) * len(step.weights), changes=None)
        if self.settings.on_nonfinite == "raise":
            chunk = bisect_right(step.plan.cut.bounds, error.samples.start) - 1
            number, what = counters.evaluations + 1, f"the loss is undefined ({error.type_name})"
            raise NonFiniteError(what, chunk, error.samples, step.number, number, error.terms) from error
        subject.renew_gradient().vector.fill_(math.nan)
        subject.show_gradients()
        return torch.scalar_tensor(math.inf, dtype=torch.float64, device="cpu")

    def waited(self, seconds: float) -> None:
        """Count the time that reading the next batch took."""
        self.policies.waited(seconds)

    def count_products(self, count: int) -> None:
        """Count `count` more Hessian products."""
        counters = self.past.counters._replace(products=self.past.counters.products + count)
        self.past = self.past._replace(counters=counters)

    @sole
    def calibrate(self) -> list[float]:
        """Time the workers on equal shares of the loaded batch; return the speeds in samples per second."""
        step, workers = self.current_step(), self.workers
        if not workers.speeds.fixed:
            plan = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(len(workers.infos)))
            with workers.without_hooks():
                for _ in range(1 if workers.evaluations else 2):
                    workers.learn_from(workers.evaluate(step._replace(plan=plan)), plan)
            speeds = [round(speed) for speed in workers.speeds.relative]
            self.observers.reporter.note("calibrated: %s samples/s", speeds)
        return list(workers.speeds.relative)

    def put_together(self, answers: Sequence[Answer], cut: Cut, samples: int) -> Any:
        """Return the rows written by the workers, in sample order, in the structure in which they were returned. Raises
        `ValueError` if chunks returned different structures."""
        form = common_form(forms_of(answers), cut.bounds)
        if form.objects is not None:
            return form.objects
        return form.filled(self.workers.backend.collected(form.columns, samples))

    # ---- the end of a step, and what belongs to none

    def end_step(self) -> None:
        """Apply the buffer changes of the step's last evaluation to the module; a second call does nothing. More
        evaluations may follow; they start from the state at the step's start. Evaluations in an examination change
        nothing."""
        step = self.step
        if step is None or step.changes is None:
            return
        if self.rules.examines:
            self.step = step._replace(changes=None)
        else:
            self.subject.buffers.take_over(step.changes)
            self.step = step._replace(changes=None, ended=True)

    def stepped(self, left: Found | None, paused: bool = False) -> None:
        """Count an optimizer's step on the loaded batch; `left`: the evaluation at the final parameters, None: the
        last one. A step that was `paused` is counted once another one has finished it."""
        step, (counters, *others) = self.step or self.loaded(), self.past
        found = counters if left is None else left
        self.past = Past(counters.stepped(step.batch.size, found.loss, found.terms, paused), *others)

    def settle(self) -> None:
        """Let a step that is paused be complete: nobody has its optimizer any more."""
        self.past = self.past._replace(counters=self.past.counters._replace(paused=False))

    @contextmanager
    def under(self, **rules: Any) -> Iterator[None]:
        """Make evaluations in the body by these rules: fields of `Rules`."""
        before = {name: getattr(self.rules, name) for name in rules}
        self.rules = self.rules._replace(**rules)
        try:
            yield
        finally:
            self.rules = self.rules._replace(**before)

    @contextmanager
    def examining(self, what: str, counted: bool = False, **rules: Any) -> Iterator[None]:
        """Let batches loaded in the body belong to no step, and be evaluated by these `rules`. Afterwards buffers,
        random draws and counters are as if there had been none; if `counted`, and nothing was raised, the evaluations
        count. A batch has to be loaded again."""
        self.resync()
        self.end_step()
        before = after = self.past
        with self.under(examines=True, **rules), self._owner.amid(what):
            try:
                yield
                if counted:
                    counters = self.past.counters._replace(steps=before.counters.steps)
                    after = self.past._replace(counters=counters)
            finally:
                self.forget()
                self.past = after._replace(outputs=None)

    def forget(self) -> None:
        """Drop the loaded batch, and whatever its evaluations would change in the module."""
        self.step = None

    # ---- tasks

    @undisturbed
    def run_task_amid(
        self, task: Task, batch: Batch, kind: Kind, use: Callable[[Sequence[Answer], Cut], T], cut: Cut | None = None
    ) -> T:
        """Order a task on `batch` and return `use(answers, cut)`.

        The samples are those of the loaded batch or (`task.aside`) others, cut as given or else as for evaluations. The
        loaded batch is kept.

        In the middle of a step (in an optimizer's callback) the program is that of the step. Otherwise it is the
        current one, and a batch that was loaded before a change of it is unloaded. Likewise the module's state is that
        of the step's start for f of the loaded batch and in the middle of a step, else the current one, also for
        outputs in a mode other than the module's own.
        """
        self.resync()
        owner, workers, name, began = self._owner, self.workers, kind.name.lower(), time.perf_counter()
        now = task.aside and not task.whole and not owner.is_amid
        if now:
            self.subject.check()
            self.end_step()
        if self.subject.buffers.is_written:
            self.subject.buffers.begin_step()
        with owner.amid(f"a call of {name}()"):
            try:
                if workers.backend.begin_task(task, batch if task.aside else None, follow=now):
                    self.forget()
                plan, answers = self._answers_to(task, batch, kind, cut)
                if answers.pattern.drew:
                    self._keep_chunks(plan)
                workers.learn_from_task(answers)
                for observer in self.observers:
                    observer.worked(name, answers, plan.cut.bounds)
                faults.point("parent.answers")
                return use(answers, plan.cut)
            finally:
                workers.backend.end_task()
                self.observers.did(name, began)

    def _answers_to(self, task: Task, batch: Batch, kind: Kind, cut: Cut | None) -> tuple[Plan, Answers]:
        """Return the plan and the answers of a task that the workers have begun, in smaller chunks if they must be."""
        workers = self.workers
        while True:
            plan = self._plan_of(task, batch, cut)
            order = plan.order(workers.number(), self.past.counters.steps, kind)
            try:
                return plan, workers.backend.evaluate(plan.cut, order, plan.runs, self.observers.busy)
            except WorkerError as error:
                if cut is not None or not self.policies.shrinks(self, error, plan.cut):
                    raise

    def _plan_of(self, task: Task, batch: Batch, cut: Cut | None) -> Plan:
        """Return the step's plan for all terms of its batch, so that draws match its evaluations; else a new plan."""
        if not task.aside and len(self.loaded().batch.parts) == len(batch.parts):
            return self.loaded().plan
        settings, speeds = self.settings, self.workers.speeds_of_tasks
        if cut is not None:
            return plan_of(cut, speeds)
        given = self.policies.size_for(batch.size, settings.chunk_size)
        return make_plan(batch.size, choose_chunk_size(batch.size, given, settings.deterministic), speeds)

    # The same for callers from outside: `run_task_amid` may be called while something works here.
    run_task = exclusive(run_task_amid)

    # ---- workers

    @sole
    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these hooks from now on."""
        self.freeze_workers()
        self.workers.set_hooks(prehook, posthook)

    @sole
    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on each worker; return the values in rank order."""
        self.freeze_workers()
        return self.workers.backend.run(function, args)

    def freeze_workers(self) -> None:
        """Keep the number of workers from now on, if it is chosen automatically: they may have state of the user's."""
        self.resync()
        self.policies.freeze_workers(self)

    @sole
    def resize(self, parallelize: int | str, speeds: Sequence[float] | None) -> None:
        """Change the number of workers; a batch has to be loaded again."""
        self.resync()
        automatic = self.settings.automatic and parallelize == "auto" and speeds is None

        def between_steps() -> None:
            self.end_step()
            self.forget()

        self.workers.resize(1 if automatic else parallelize, speeds, between_steps)
        self.policies.resized(self, automatic)

    def use(self, way: Way, step: Step | None = None) -> None:
        """Evaluate by other workers, and continue this step there; without one, a batch has to be loaded again."""
        self.forget()  # also if this is interrupted
        self.workers.use(way)
        if step is not None:
            self.workers.load(self.workers.prepare(step.batch), step.weights)
            self.step = step._replace(plan=self.workers.plan(step.batch.size, step.chunk_size))

    def close(self) -> None:
        """Stop the workers, or, in the middle of another call, soon after; X remains in this process's memory."""
        if not self._owner.is_here or self.workers.closed:
            return
        if self._owner.at_last(self._close):
            self.workers.backend.stop()
        else:
            self._close()

    @sole
    def _close(self) -> None:
        if not self.workers.closed:
            self.end_step()
            self.observers.reporter.close()
            self.policies.close()
            self.workers.close()
            self.past = self.past._replace(outputs=None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def closed() -> BatchoptError:
    """Return the error of a call after `close`."""
    return BatchoptError("this BatchOptimizer was closed: build a new one")
