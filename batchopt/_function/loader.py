"""The module, its workers and the loaded batch; the changes that a step makes to them, and how they are undone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from batchopt._data.batches import Readings, read_batch
from batchopt._data.denominators import marks_of
from batchopt._data.forms import BatchForm, with_form
from batchopt._data.terms import Term, reweighed
from batchopt._function.checks import refuse_frequencies
from batchopt._function.observer import Trial
from batchopt._function.observers import Observers
from batchopt._function.reporter import Reporter
from batchopt._function.settings import Settings
from batchopt._function.step import Counters, Step
from batchopt._function.workers import Workers
from batchopt._machine.ownership import Owner, exclusive, undisturbed
from batchopt._mapreduce.plan import NEW, Plan, choose_chunk_size, follow, make_plan
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flat_module import FlatModule
from batchopt._program.flatten import check_hooks
from batchopt.backends.base import Prepared
from batchopt.errors import BatchoptError
from batchopt_workers.data.batch import Batch
from batchopt_workers.worker import Hook

T = TypeVar("T")
Self = TypeVar("Self", bound="BatchLoader")


class Past(NamedTuple):
    """The counters; the results of the posthook in the last evaluation; and, where gradients are compressed, the number
    of the last evaluation whose residuals count. A step that fails restores the record with which it began."""

    counters: Counters
    hook_results: list[Any]
    residuals: int = 0


class Planned(NamedTuple):
    """The plan of a batch of `size` samples, made or kept with these speeds."""

    size: int
    chunk_size: int | None
    speeds: Speeds
    plan: Plan


class BatchLoader:
    """Holds a module, workers and counters, and loads batches; `BatchFunction` evaluates them."""

    def __init__(self, subject: FlatModule, settings: Settings, counters: Counters | None = None) -> None:
        """Start the workers. Raises `WorkerStartError`; `WorkerError` if precode raises."""
        self.owner = self._owner = Owner()
        self.subject, self.settings = subject, settings
        self._reporter = Reporter(settings.verbose)  # first, since it also reports slow starts
        try:
            self.workers = Workers(subject, settings)
        except BaseException:
            self._reporter.close()
            raise
        self._read: tuple[Any, Readings] | None = None  # cached with its key
        self._form: tuple[Readings, BatchForm] | None = None  # of the last batch read
        self._terms = settings.terms
        self.verbose = settings.verbose if self.is_main else 0
        if not self.verbose:
            self._reporter.close()
            self._reporter = Reporter(0)
        self.observers = Observers([self._reporter] if self.verbose else [])
        self._checks_cut = settings.check_cut
        self._step: Step | None = None
        self._planned: Planned | None = None  # the last plan
        self._cuts = settings.chunk_size, settings.deterministic
        self._placed: Prepared | None = None  # the batch that the workers can read
        self._past = Past(counters or Counters(), [])
        self._goes_back_to: Past | None = None  # if the current step fails
        self._compresses = settings.compress is not None
        self._changes: torch.Tensor | None = None  # to buffers, in the step's last evaluation
        self._ended = False  # the module has these changes already
        self._is_apart = False  # evaluations belong to no step
        self._keeps_outputs = False
        self._outputs: Any = None  # of the module, in the last evaluation
        self._closed = False

    # ---- state

    @property
    def is_main(self) -> bool:
        """Tell whether this process prints and writes files: exactly one of several that run the same script."""
        return self.workers.backend.is_main

    @exclusive
    def once(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, or raise its exception, from the process that writes files."""
        return self.workers.backend.once(function)

    @property
    def past(self) -> Past:
        """The counters and the last hook results."""
        return self._past

    @property
    def readings(self) -> Readings:
        """The rules by which data becomes a batch, by term name, with the current criterion."""
        marks = marks_of(self.settings.criterion), self.workers.alone
        if self._read is None or self._read[0] != marks:
            device = None if self.workers.alone else self.subject.x.device
            self._read = marks, self.settings.readings(device)
        return self._read[1]

    @property
    def terms(self) -> dict[str, Term] | None:
        """The terms, with their current weights."""
        return self._terms

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each term in f, for the batch that is loaded next; `(1.0,)` without terms."""
        return (1.0,) if self._terms is None else tuple(term.weight for term in self._terms.values())

    @exclusive
    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the term weights for the batch that is loaded next."""
        self._terms = reweighed(self._terms, weights)

    def check_open(self) -> None:
        """Bring X up to date with the module. Raises `BatchoptError` after `close`, and if that is impossible."""
        if self._closed:
            raise closed()
        self.subject.resync()

    @property
    def is_closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._closed

    def without_bar(self) -> AbstractContextManager[None]:
        """Pause the progress bar of evaluations in the body."""
        return self._reporter.without_bar()

    def follow(self) -> FlatModule:
        """Return the module with X up to date; after `close`, as it was then."""
        if not self._closed:
            self.subject.resync()
        return self.subject

    @property
    def parameters(self) -> torch.Tensor:
        """X, up to date with the module."""
        return self.follow().x

    def ready(self) -> Step:
        """Return the step on the loaded batch, with X up to date. Raises `ValueError` for a parameter hook, too."""
        if self._closed:
            raise closed()
        self.subject.resync()
        check_hooks(self.subject.named)
        return self._step or self._loaded()

    def _loaded(self) -> Step:
        if self._step is None:
            raise BatchoptError("no batch was loaded: call load(inputs, targets) or step(inputs, targets)")
        return self._step

    @undisturbed
    def prepare(self, inputs: Any, targets: Any, options: Any, ahead: bool = False) -> Prepared:
        """Read the batch, and place it where workers can read it; unless `ahead`, the loaded one is dropped."""
        with self.observers.doing("read ahead" if ahead else "load"):
            batch = self._read_batch(inputs, targets, options)
            if not ahead:
                self.end_step()
                self._step = None
            self._placed = self.workers.backend.prepare(batch, ahead)
            return self._placed

    def _read_batch(self, inputs: Any, targets: Any, options: Any) -> Batch:
        """Return the batch, in the form of the previous one if it fits."""
        readings = self.readings
        if self._form is not None and self._form[0] is readings and options is None:
            batch = self._form[1].filled(inputs, targets, readings[None])
            if batch is not None:
                return batch
        batch = with_form(read_batch(inputs, targets, options, readings))
        self._form = None if batch.plain is None or None not in readings else (readings, batch.plain.form)
        return batch

    @undisturbed
    def _begin(self, prepared: Prepared) -> None:
        subject, workers = self.subject, self.workers
        subject.check()
        self.end_step()
        workers.grow(self._reporter.not_grown)
        with self.observers.doing("load"), undone_if_it_fails(self):
            self._step = None
            if prepared is not self._placed:  # another batch was placed since
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
            # samples that move to another worker are read again; with fixed chunks those are few
            moves = movable and (chunk_size is not None or not batch.is_kept)
            self._step = Step(number, batch, weights, chunk_size, plan, moves)
            self._planned = Planned(batch.size, chunk_size, workers.speeds, plan)

    def _plan_of(self, size: int, chunk_size: int | None) -> Plan:
        """Return the previous plan if it fits, so that evaluations can be repeated, else a new one."""
        speeds, planned = self.workers.speeds, self._planned
        if planned is not None and (planned.size, planned.chunk_size) == (size, chunk_size):
            plan = planned.plan
            if planned.speeds is speeds and (plan.age >= NEW or len(plan.shares) == 1):
                return plan
            if len(plan.shares) == len(speeds.values) and math.isfinite(speeds.makespan(plan.samples())):
                return follow(plan, chunk_size, speeds)
        return make_plan(size, chunk_size, speeds)

    @exclusive
    @undisturbed
    def calibrate(self) -> list[float]:
        """Time the workers on equal shares of the loaded batch; return the speeds in samples per second."""
        step, workers = self.ready(), self.workers
        if not workers.speeds.fixed:
            plan = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(len(workers.infos)))
            with self._at_start(), workers.without_hooks():
                for _ in range(1 if workers.evaluations else 2):
                    workers.learn_from(workers.evaluate(step._replace(plan=plan)), plan)
            self._reporter.note("calibrated: %s samples/s", [round(speed) for speed in workers.speeds.relative])
        return list(workers.speeds.relative)

    # ---- undoing

    @contextmanager
    def apart(self, what: str, counted: bool = False) -> Iterator[None]:
        """Let batches loaded in the body belong to no step. Afterwards buffers, random draws and counters are as if
        there had been none; if `counted`, and nothing was raised, the evaluations count. A batch has to be loaded
        again."""
        self.check_open()
        self.end_step()
        before = after = self._past
        outer, self._is_apart = self._is_apart, True
        try:
            with self.owner.amid(what):
                yield
            if counted:
                counters = replace(self._past.counters, steps=before.counters.steps)
                after = self._past._replace(counters=counters)
        finally:
            self._forget_batch()
            self._past, self._is_apart = after, outer

    @contextmanager
    def under_examination(self) -> Iterator[None]:
        """Let evaluations in the body leave no trace, except that a batch has to be loaded again."""
        checks_cut, self._checks_cut = self._checks_cut, False
        compresses, self._compresses = self._compresses, False
        try:
            with self.apart("check()"):
                yield
        finally:
            self._checks_cut, self._compresses = checks_cut, compresses

    def end_step(self) -> None:
        """Apply the buffer changes of the step's last evaluation to the module; a second call does nothing. More
        evaluations may follow; they start from the state at the step's start. Evaluations that are `apart` change
        nothing."""
        if self._is_apart:
            self._changes = None
        if self._changes is not None:
            self.subject.buffers.take_over(self._changes)
            self._changes, self._ended = None, True

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        """Give the module its state at the step's start in the body, even if the step has ended or the user has set
        it."""
        left = self._ended or self.subject.buffers.is_written
        with self.subject.buffers.at_start() if left else nullcontext():
            if left:
                self.workers.backend.restart_step()
            yield

    def _forget_batch(self) -> None:
        self._step = self._changes = self._outputs = None

    def stepped(self, left: Trial | None) -> None:
        """Count an optimizer's step on the loaded batch; `left`: the evaluation at the final parameters."""
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
        """Continue from these; from `speeds` only if the number of workers matches. A batch has to be loaded again."""
        number = 0
        if self._compresses and residuals:
            number = self.workers.number()
            self.workers.compressing.restore_residuals(number, residuals)
        elif residuals:
            warnings.warn(
                "the state contains compression residuals, which are dropped because `compress` is not set: give the "
                "same `compress` to resume with the same bits",
                RuntimeWarning,
                stacklevel=3,
            )
        self._terms, self._past = terms, Past(counters, self._past.hook_results, number)
        self._planned = None
        self._forget_batch()
        if len(speeds) == len(self.workers.infos) and not self.workers.speeds.fixed:
            self.workers.set_speeds(Speeds(tuple(speeds)))

    # ---- for the doctor

    def cut_in_chunks(self, least: int) -> tuple[int, int]:
        """Cut the loaded batch into at least `least` chunks of fixed size; return the sizes of batch and chunk."""
        step = self.ready()
        size = step.batch.size
        chunk_size = step.chunk_size or math.ceil(size / max(least, len(self.workers.infos)))
        self._step = step._replace(chunk_size=chunk_size, plan=make_plan(size, chunk_size, self.workers.speeds))
        return size, chunk_size

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
        """Call `function(worker, *args)` on each worker; return the values in rank order."""
        self.check_open()
        return self.workers.backend.run(function, args)

    @exclusive
    @undisturbed
    def resize(self, parallelize: int | str, speeds: Sequence[float] | None) -> None:
        """Change the number of workers; a batch has to be loaded again."""
        self.check_open()

        def between_steps() -> None:
            self.end_step()
            self._step = self._placed = self._planned = None

        self.workers.resize(parallelize, speeds, between_steps)
        self.workers.backend.keep_outputs(self._keeps_outputs)

    def use(self, workers: int, threads: int | None) -> None:
        """Evaluate by another number of workers and threads; a batch has to be loaded again."""
        self.workers.use(workers, threads)
        self.workers.backend.keep_outputs(self._keeps_outputs)

    def close(self) -> None:
        """Stop the workers, or, in the middle of another call, soon after; X remains in this process's memory."""
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
            self._placed = self._outputs = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def closed() -> BatchoptError:
    """Return the error of a call after `close`."""
    return BatchoptError("this BatchOptimizer was closed: build a new one")


class undone_if_it_fails:
    """Restores the counters and buffers of a function if the body raises; a batch has to be loaded again."""

    def __init__(self, function: BatchLoader) -> None:
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
                has_begun = function._step is not step or not ended  # else it had ended before: its results stay
                if function._step is not None and has_begun and not function.subject.buffers.is_written:
                    function.subject.buffers.restore()
                function._forget_batch()
        finally:
            function._goes_back_to = outer
