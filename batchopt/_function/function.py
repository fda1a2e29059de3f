"""The function of one batch: f(X) and df/dX of a module's loss, evaluated by workers, as often as one asks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from batchopt._data.batches import read_batch
from batchopt._function.calibrate import measure
from batchopt._function.counters import History
from batchopt._function.cut_check import compare, refuse_frequencies
from batchopt._function.nonfinite import explain
from batchopt._function.timeline import PARENT, Timeline
from batchopt._function.workforce import Workforce
from batchopt._machine.ownership import exclusive, undisturbed
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.plan import choose_chunk_size, follow, make_plan
from batchopt._mapreduce.reduce import reduce_answers, weighed
from batchopt.backends.base import Prepared
from batchopt_workers import faults
from batchopt_workers.evaluate import Program
from batchopt_workers.messages import Kind


class BatchFunction(Workforce):
    """f and df/dX of whole batches, on workers; `BatchOptimizer` adds an optimizer to it.

    Raises, when it is made, `TypeError` or `ValueError` for a module that cannot be flattened or sent, before a process
    starts; `WorkerError` if precode raises.
    """

    @exclusive
    def load(self, inputs: Any, targets: Any = None, options: Sequence[Any] | None = None) -> None:
        """Make this the batch of the evaluations to come; nothing is evaluated, but the first batch measures the
        workers.

        `inputs` and `targets` are tensors or NumPy arrays, or tuples, lists, mappings or dataclasses of them, whose first
        dimension is the sample; or lists with one entry a sample. `options` has one object a sample, for the hooks. With
        `terms`, `inputs` is a dict with an entry for each: its inputs, or a tuple of inputs, targets and options. A new step
        begins: the module, the criterion, loss functions and hooks, with all that they refer to, are taken as they are now,
        and so are `weights`. Do not change the data before the next `load`: when it is read, at once or when it is needed,
        depends on the backend. Raises `ValueError` or `TypeError` for data that is no batch, for a program that cannot be
        sent any more, and if X is no longer the module's.
        """
        self._check_open()
        self._begin(self._prepare(inputs, targets, options))

    @undisturbed
    def _prepare(self, inputs: Any, targets: Any, options: Any, ahead: bool = False) -> Prepared:
        """Read the batch, and bring it to where the workers can read it; it has to be the next one that is begun.
        `ahead`: while the present one is still needed; else that one is gone."""
        with self._doing("read ahead" if ahead else "load"):
            batch = read_batch(inputs, targets, options, self._readings)
            if not ahead:
                self._end_step()
                self._batch = None
            return self._backend.prepare(batch, ahead)

    @undisturbed
    def _begin(self, prepared: Prepared) -> None:
        """Begin a step on what was prepared."""
        self._flat.check(self._module, self._params)
        self._end_step()
        self._grow()
        batch = prepared.batch
        with self._doing("load"), self._undone_if_it_fails():
            self._batch = None
            self._buffers.begin_step()
            self._weights = self._settings.weights
            self._backend.load(prepared, self._weights)
            self._batch = batch
            self._history = replace(self._history, steps=self._history.steps + 1)
            self._speeds = self._speeds.without(worker.rank for worker in self.workers if worker.lost)
            if not self._speeds.measured and len(self.workers) > 1 and self._prehook is None and self._posthook is None:
                self._calibrate()
            self._chunks = choose_chunk_size(batch.size, self._settings.chunk_size, self._settings.deterministic)
            self._plan = make_plan(batch.size, self._chunks, self._speeds)
            refuse_frequencies(self._module, len(self.workers), batch, self._plan.cut.chunks)
            self._report.idle(batch.size, self._chunks and self._plan.cut.chunks, len(self.workers))
            self._movable = not self._report.cut_matters(self._module, self._plan.cut.chunks)
            if self._movable:
                self._check_cut()

    def _check_cut(self) -> None:
        """Warn if the loss of a few samples depends on how they are cut; once, when it is cut for the first time."""
        batch, bounds = self._loaded(), self._plan.cut.bounds
        if not self._settings.check_cut or (len(bounds) == 2 and len(self.workers) == 1):
            return
        self._settings = replace(self._settings, check_cut=False)
        largest = max(stop - start for start, stop in pairwise(bounds))
        gradients = [parameter.grad for parameter in self._params]
        try:
            with self._without_hooks():
                arguments = self._readings, largest, self._next_number, self._history.steps, self._flat.vector.dtype
                found = self._learning(lambda: compare(self._backend, batch, *arguments))
        finally:
            for parameter, gradient in zip(self._params, gradients, strict=True):
                parameter.grad = gradient
        self._report.cut_differs(found)

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record who does what when, inside a `with` statement; costs nothing outside of it.

        `with opt.timeline() as timeline: ...`; then `print(timeline)` for each worker's utilisation and split,
        `timeline.save("trace.json")` for a trace viewer (Perfetto), `timeline.draw("timeline.png")` for a picture.
        """
        self._timeline = Timeline()
        try:
            yield self._timeline
        finally:
            self._timeline.close()
            self._timeline = None

    def _doing(self, name: str) -> AbstractContextManager[None]:
        """What is inside, as an event of the timeline."""
        return nullcontext() if self._timeline is None else self._timeline.doing(name)

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """Counters, draws and buffers of the step's start, if what is inside raises; a batch has to be loaded anew."""
        history, hook_results = self._history, self.hook_results
        try:
            yield
        except BaseException:
            self._history, self.hook_results = history, hook_results
            if self._batch is not None:
                self._buffers.restore()
            self._batch = self._changes = None
            raise

    @exclusive
    def calibrate(self) -> list[float]:
        """Time each worker on a part of the loaded batch; returns the speeds in samples per second.

        Runs by itself at the first batch, unless there are hooks: then the first evaluation, in equal shares, is the
        measurement. Later evaluations keep the speeds current. Hooks do not run here. Fixed `speeds` are returned as
        they are.
        """
        return self._calibrate()

    @undisturbed
    def _calibrate(self) -> list[float]:
        samples = self._ready().size
        if not self._speeds.fixed:
            with self._without_hooks():
                measured = self._learning(
                    lambda: measure(self._backend, samples, self._next_number, self._history.steps)
                )
                self._observe(*measured)
            self._report.note("calibrated: %s samples/s", [round(speed) for speed in self._speeds.relative()])
        return self._speeds.relative()

    @exclusive
    @undisturbed
    def evaluate(self) -> torch.Tensor:
        """f at the current parameters (0-dim, float64), and df/dX in `grad_parameters` and every parameter's `.grad`.

        Any number of times; the closure for any optimizer: `torch_optimizer.step(opt.evaluate)`. Gradients are
        overwritten, not accumulated; a parameter that f does not depend on gets None. Torch's settings and contexts
        (autocast, default dtype, ...) are those in force here. Raises `WorkerError` if the user's code raised,
        `NonFiniteError` for an infinite or NaN result, and `ValueError` for a context that workers cannot be in, and for a
        forward that writes what is too large to be kept for each chunk; X is untouched then, gradients are of no use.
        """
        with self._in_the_middle_of("an evaluation"):
            return self._evaluate()

    def _evaluate(self) -> torch.Tensor:
        began = time.perf_counter()
        if self._trials is not None:
            self._trials.begin()
        answers = self.map()
        mapped = time.perf_counter()
        faults.point("parent.reduce")
        loss = self.reduce(answers)
        ended = time.perf_counter()
        past, terms = self._history, dict(zip(self._settings.terms or (), self._reduced, strict=False))
        self._history = replace(
            past, evaluations=past.evaluations + 1, loss=loss.item(), losses=past.chained(loss.item()), terms=terms
        )
        if self._trials is not None:
            self._trials.end(loss.item(), terms)
        self._report.evaluated(self.eval_counter, self.batch_counter + 1, self.output, ended - began, answers)
        if self._timeline is not None:
            self._timeline.add(PARENT, "map", began, mapped - began, evaluation=self.eval_counter, loss=self.output)
            self._timeline.add(PARENT, "reduce", mapped, ended - mapped)
            self._timeline.add_answers(answers, self._plan.cut.bounds)
        return loss

    @undisturbed
    def map(self) -> list[Answer]:
        """The first half of `evaluate`: partial losses and gradients from every worker that had a share.

        A subclass may override it, and `reduce`.
        """
        self._ready()
        if self._movable:
            self._plan = follow(self._plan, self._chunks, self._speeds)
        answers = self._evaluate_plan(Kind.EVALUATE)
        samples, seconds = [0] * len(self.workers), [0.0] * len(self.workers)
        results: dict[int, list[Any]] = {}
        for answer in answers:
            samples[answer.rank] += answer.samples
            seconds[answer.rank] += answer.seconds
            results.update(answer.results)
        for worker, its_samples, its_seconds in zip(self.workers, samples, seconds, strict=True):
            worker.samples += its_samples
            worker.busy_seconds += its_seconds
        for rank, (late_samples, late_seconds) in self._backend.late.items():
            samples[rank] += late_samples
            seconds[rank] += late_seconds
        self._speeds = self._speeds.rested(
            i for i, count in enumerate(self._plan.samples()) if not (count or samples[i])
        )
        self._observe(samples, seconds)
        self.hook_results = [result for _, of_chunk in sorted(results.items()) for result in of_chunk]
        return answers

    def _evaluate_plan(self, kind: Kind) -> list[Answer]:
        """What the workers make of the loaded batch, as it is planned."""
        return self._learning(
            lambda: self._backend.evaluate(
                self._plan.cut, self._plan.orders(self._next_number(), self._history.steps, kind), self._while_busy
            )
        )

    def _while_busy(self) -> None:
        """What this process does while the workers compute."""
        if self._trials is not None:
            self._trials.look()
        if self._meanwhile is not None:
            self._meanwhile()

    @undisturbed
    def reduce(self, answers: Sequence[Answer]) -> torch.Tensor:
        """The second half of `evaluate`: merge `answers` into f, which is returned, and df/dX."""
        whole = reduce_answers(answers, self._plan.cut.chunks, self._grad)
        for parameter, view, used in zip(self._params, self._grad_views, whole.used, strict=True):
            parameter.grad = view if used else None
        self._changes = whole.changes.clone()
        loss = weighed(whole.losses, self._weights)
        finite = whole.finite and math.isfinite(loss)
        if not finite and self._settings.on_nonfinite == "raise":
            self._changes = None
            numbering = self._loaded().numbering
            with self._without_hooks():
                raise explain(self._backend, self._plan.cut, numbering, self._next_number, self._history)
        self._reduced = whole.losses
        return torch.scalar_tensor(loss if finite else math.inf, dtype=torch.float64, device="cpu")

    def load_in_chunks(self, least: int, inputs: Any, targets: Any, options: Any) -> tuple[int, int]:
        """Load the batch, cut into `least` chunks or more of a size that stays; returns the numbers of samples in all
        and in a chunk."""
        self.load(inputs, targets, options)
        size = self._loaded().size
        self._chunks = self._chunks or math.ceil(size / max(least, len(self.workers)))
        self._plan = make_plan(size, self._chunks, self._speeds)
        return size, self._chunks

    @property
    def program(self) -> Program:
        """What is evaluated."""
        return self._program(replace(self._settings, prehook=self._prehook, posthook=self._posthook))

    def twin(self, program: Program, **changes: Any) -> BatchFunction:
        """The same function of another program, in this process, with the same draws in its first step."""
        settings = self._settings.having(program)
        alone: dict[str, Any] = {
            "backend": "serial",
            "parallelize": 1,
            "speeds": None,
            "options": {},
            "devices": None,
            "precode": None,
            "verbose": 0,
            "check_cut": False,
        }
        return BatchFunction(
            program.module, replace(settings, **alone, **changes), History(steps=self._history.steps - 1)
        )

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """What is evaluated inside leaves no trace, but that a batch has to be loaded anew."""
        self._check_open()
        self._end_step()
        kept = self._history, self.hook_results
        check_cut, self._settings = self._settings.check_cut, replace(self._settings, check_cut=False)
        try:
            with self._in_the_middle_of("check()"):
                yield
        finally:
            self._batch = self._changes = None
            self._history, self.hook_results = kept
            self._settings = replace(self._settings, check_cut=check_cut)

    def _next_number(self) -> int:
        return next(self._numbers)
