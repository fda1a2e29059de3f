"""The workers of a function: their backend, their hooks, their speeds and their number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from batchopt._data import arguments
from batchopt._engine.search import Way
from batchopt._engine.settings import Settings
from batchopt._engine.step import Step
from batchopt._mapreduce.plan import NEW, Plan, make_plan, replan
from batchopt._mapreduce.reduce import Answers
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flat_module import FlatModule, Gradient
from batchopt._program.frequencies import refuse_frequencies
from batchopt._program.program import check_trained
from batchopt.backends import backend_class
from batchopt.backends.base import Backend, CompressingBackend, Meanwhile, Prepared, Setup, WorkerInfo
from batchopt.errors import WorkerError, WorkerStartError
from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.program import Hook, Program
from batchopt_workers.life.torch_settings import module_hooks
from batchopt_workers.shortcuts.form import Artifact
from batchopt_workers.wire.orders import Order

# A worker is to be given less if it takes this many times the average, plus this many seconds.
UNEVEN, NOTICEABLE = 1.25, 2e-3
# Seconds after which workers that are even are measured again.
LATELY = 0.25


def program_of(subject: FlatModule, settings: Settings) -> Program:
    """Return the program of this module under these settings."""
    return Program(
        subject.module,
        settings.criterion,
        settings.loss_fns,
        settings.seed,
        settings.prehook,
        settings.posthook,
        module_hooks(),
        graphs=settings.graph,
    )


def setup_of(subject: FlatModule, settings: Settings) -> Setup:
    """Return the setup of a backend. Raises for every fault that can be known without starting anything."""
    refuse_frequencies(subject.module, settings.parallelize)
    setup = Setup(
        workers=settings.parallelize,
        fixed_bits=settings.fixed_bits,
        timeout=settings.timeout,
        restarts=settings.max_restarts,
        threads=settings.threads_per_worker,
        devices=settings.devices,
        precode=settings.precode,
        program=program_of(subject, settings),
        flat=subject.flat,
        parameters=subject.parameters,
        buffers=subject.buffers,
        options=settings.options,
        compression=settings.compress,
    )
    settings.backend_class.check(setup)
    return setup


def anticipate(subject: FlatModule, settings: Settings) -> None:
    """Check everything that can be checked without starting anything, then begin slow starts in advance."""
    setup = setup_of(subject, settings)
    check_trained(setup.program, subject.parameters)
    settings.backend_class.anticipate(setup)


class CachedPlan(NamedTuple):
    """The plan of a batch of `size` samples, made or kept with these speeds."""

    size: int
    chunk_size: int | None
    speeds: Speeds
    plan: Plan


class Workers:
    """Evaluates on a backend, plans by the speeds of its workers, which it keeps current, and changes hooks and number
    on request."""

    def __init__(self, subject: FlatModule, settings: Settings) -> None:
        self._subject, self._settings = subject, settings
        self.mode = setup_of(subject, settings).mode
        self.backend = self._start(settings)
        if settings.speeds is not None and len(settings.speeds.values) != len(self.infos):
            self.backend.close()
            raise ValueError(
                f"`speeds` has {len(settings.speeds.values)} entries, but the ranks have {len(self.infos)} workers in "
                "total: give one for each, those of rank 0 first, or leave them out, and they are measured"
            )
        self.speeds = settings.speeds or Speeds.unknown(len(self.infos))
        self._task_speeds = Speeds.unknown(len(self.infos))
        self.evaluations, self._learned_at = 0, 0.0  # by the current number of workers
        self._numbers = count(1)
        self._placed: Prepared | None = None  # the batch that they can read
        self._plan: CachedPlan | None = None  # the last plan
        self.closed = False

    def _start(self, settings: Settings) -> Backend:
        return settings.backend_class(setup_of(self._subject, settings))

    def close(self) -> None:
        """End the workers, and forget the batch that they have; a second call does nothing."""
        self.closed, self._placed = True, None
        self.backend.close()

    @property
    def alone(self) -> bool:
        """Tell whether this process is the worker."""
        return self._settings.alone

    @property
    def infos(self) -> list[WorkerInfo]:
        """The public record of each worker, in rank order."""
        return self.backend.workers

    def number(self) -> int:
        """Return a new number for the next evaluation."""
        return next(self._numbers)

    # ---- hooks

    @property
    def hooks(self) -> tuple[Hook | None, Hook | None]:
        """The hooks before each forward and after each backward."""
        return self._settings.prehook, self._settings.posthook

    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these from now on. Raises `TypeError` for objects that are no hooks or cannot be sent."""
        for name, hook in (("prehook", prehook), ("posthook", posthook)):
            arguments.check_callable(name, hook)
        self._change_mode(prehook=prehook, posthook=posthook)
        self._settings = replace(self._settings, prehook=prehook, posthook=posthook)

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Disable the hooks in the body."""
        try:
            self._change_mode(hooked=False)
            yield
        finally:
            self._change_mode(hooked=True)

    def _change_mode(self, **fields: Any) -> None:
        mode = self.mode._replace(**fields)
        self.backend.set_mode(mode)
        self.mode = mode

    @property
    def program(self) -> Program:
        """The program that the workers evaluate."""
        return program_of(self._subject, self._settings)

    @property
    def compressing(self) -> CompressingBackend:
        """The backend, where gradients are compressed."""
        assert isinstance(self.backend, CompressingBackend)  # ensured by `Settings.read`
        return self.backend

    # ---- batches and their plans

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        """Place `batch` where the workers can read it. `ahead`: the current one is still needed."""
        self._placed = prepared = self.backend.prepare(batch, ahead)
        return prepared

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> int:
        """Begin a step on a prepared batch; return the number of workers. Raises what `Backend.load` raises."""
        infos = self.backend.workers
        if prepared is not self._placed:  # another batch was placed since
            prepared = self.prepare(prepared.batch)
        self.backend.load(prepared, weights)
        lost = frozenset([worker.rank for worker in infos if worker.lost])
        if lost != self.speeds.absent:  # give nothing to those that will not come back
            self.speeds = self.speeds.without(lost)
        return len(infos)

    def plan(self, size: int, chunk_size: int | None) -> Plan:
        """Return the plan of a batch that is loaded: the previous one if it fits, so that evaluations can be repeated,
        else a new one."""
        speeds, before, plan = self.speeds, self._plan, None
        if before is not None and before[:2] == (size, chunk_size):
            plan = before.plan
            if before.speeds is speeds and (plan.age >= NEW or len(plan.shares) == 1):
                return plan
            fits = len(plan.shares) == len(speeds.values) and math.isfinite(speeds.makespan(plan.samples()))
            plan = replan(plan, chunk_size, speeds) if fits else None
        plan = plan or make_plan(size, chunk_size, speeds)
        self._plan = CachedPlan(size, chunk_size, speeds, plan)
        return plan

    def replan(self, step: Step) -> Plan:
        """Return the plan for the next evaluation of a step, another one if it is movable and speeds make that
        noticeably faster."""
        plan, cached, speeds = step.plan, self._plan, self.speeds
        is_old = plan.age >= NEW or speeds.fixed or len(plan.shares) == 1
        if not step.movable or (is_old and cached is not None and cached.speeds is speeds and cached.plan is plan):
            return plan
        plan = replan(plan, step.chunk_size, speeds)
        self._plan = CachedPlan(step.batch.size, step.chunk_size, speeds, plan)
        return plan

    def keep_outputs(self, keep: bool) -> None:
        """Set whether evaluations keep the module's outputs."""
        self._change_mode(outputs=keep)

    def evaluate_by(self, artifacts: tuple[Artifact, ...]) -> None:
        """Evaluate by these artifacts where they serve."""
        if artifacts != self.mode.artifacts:
            self._change_mode(artifacts=artifacts)

    # ---- evaluations

    def evaluate(
        self, step: Step, meanwhile: Meanwhile | None = None, into: Gradient | None = None, compress: bool = False
    ) -> Answers:
        """Evaluate a loaded batch as planned; raises what `Backend.evaluate` raises."""
        plan, evaluate = step.plan, self.compressing.evaluate_compressed if compress else self.backend.evaluate
        order = Order(next(self._numbers), step.number, 0, plan.cut.chunks)
        return evaluate(plan.cut, order, plan.runs, meanwhile, into)

    # ---- speeds

    def learn_from(self, answers: Answers, plan: Plan) -> None:
        """Count the workers' part in an evaluation, and use it as a measurement: not the first one, which warms up, and
        if it repeats the one before only where workers were uneven, or have not been measured lately."""
        infos, longest, total = self.backend.workers, 0.0, 0.0
        for answer, (_, seconds) in zip(answers.pattern.answers, answers.times, strict=True):
            infos[answer.rank].samples += answer.samples
            infos[answer.rank].busy_seconds += seconds
            total += seconds
            longest = max(longest, seconds)
        is_even = longest <= UNEVEN * total / max(len(answers.times), 1) + NOTICEABLE
        is_known = is_even and self.evaluations > 1 and time.monotonic() < self._learned_at + LATELY
        if answers.losses is not None and is_known:
            return
        self.evaluations += 1
        if self.evaluations == 1:
            return
        self._learned_at = time.monotonic()
        samples, seconds_of = self._work_of(answers)
        planned = plan.samples()
        speeds = self.speeds.rested(i for i, share in enumerate(planned) if not (share or samples[i]))
        self.set_speeds(speeds.observed(samples, seconds_of))

    @property
    def speeds_of_tasks(self) -> Speeds:
        """The speeds by which tasks are split: the measured ones, or until then those of earlier tasks."""
        return self.speeds if self.speeds.measured else self._task_speeds.resized(len(self.infos))

    def learn_from_task(self, answers: Answers) -> None:
        """Use the times of a task as a measurement as long as there is no better one."""
        if len(self.infos) > 1 and not self.speeds.measured:
            samples, seconds = self._work_of(answers)
            self._task_speeds = self._task_speeds.resized(len(self.infos)).observed(samples, seconds)

    def _work_of(self, answers: Answers) -> tuple[list[int], list[float]]:
        """Return the samples and the seconds of each worker, with the work of those that came too late to count."""
        samples, seconds = [0] * len(self.infos), [0.0] * len(self.infos)
        for answer in answers:
            samples[answer.rank] += answer.samples
            seconds[answer.rank] += answer.seconds
        for rank, (late_samples, late_seconds) in answers.pattern.stragglers.items():
            samples[rank] += late_samples
            seconds[rank] += late_seconds
        return samples, seconds

    def set_speeds(self, speeds: Speeds) -> None:
        """Split by these from now on."""
        self.speeds = speeds
        for worker, speed in zip(self.infos, speeds.values, strict=True):
            worker.speed = speed

    # ---- how many

    def resize(self, parallelize: int | str, speeds: Sequence[float] | None, before: Callable[[], None]) -> None:
        """Change the number of workers; `before` is called once everything is checked. Raises `ValueError` if it cannot
        change like that."""
        if self.speeds.fixed and speeds is None:
            raise ValueError("`speeds` were given: resize(parallelize, speeds=...) needs them for the new workers")
        if self._settings.devices is not None and not self._settings.candidates:
            raise ValueError("`devices` were given, one for each worker: build a new BatchOptimizer with others")
        asked = backend_class(self._settings.backend).read_workers(parallelize)
        workers = len(self.infos) + self.backend.room() if asked is None else asked
        given = None if speeds is None else arguments.read_speeds(speeds, workers)
        settings = replace(self._settings, parallelize=asked, devices=None)
        before()
        self._placed = self._plan = None
        if settings.alone != self.alone or self._settings.devices is not None:
            self._restart(settings)
        else:
            self.backend.resize(workers)
        self._adopt(settings)
        self.set_speeds(self.speeds.resized(len(self.infos)) if given is None else given)

    def _restart(self, settings: Settings) -> None:
        backend = self._start(settings)
        self.backend.close()
        self.backend, self._settings = backend, settings

    def _adopt(self, settings: Settings) -> None:
        self._settings, self.evaluations = settings, 0
        self._change_mode(threads=settings.threads_per_worker)

    @property
    def way(self) -> Way:
        """The number of workers, and of threads of each, and where they are."""
        return Way(len(self.infos), self._settings.threads_per_worker, self._settings.devices or ())

    def use(self, way: Way) -> None:
        """Evaluate by other workers. Raises what `Workers` raises."""
        settings = self._settings.using(way)
        self._placed = self._plan = None
        if not (settings.alone and self.alone):
            self._restart(settings)
        self._adopt(settings)
        self.set_speeds(Speeds.unknown(len(self.infos)))

    @contextmanager
    def with_threads(self, threads: int | None) -> Iterator[None]:
        """Use this number of threads in the body, in this process."""
        try:
            self._change_mode(threads=threads)
            yield
        finally:
            self._change_mode(threads=self._settings.threads_per_worker)

    def anticipate(self, way: Way) -> None:
        """Begin the slow part of starting these workers. Raises for faults that can be known before."""
        settings = self._settings.using(way)
        settings.backend_class.anticipate(setup_of(self._subject, settings))

    def can_start(self) -> bool:
        """Tell whether what `anticipate` began is complete."""
        return backend_class(self._settings.backend).is_anticipated()

    def grow(self, refused: Callable[[int, Exception], None]) -> None:
        """Use machines that have joined, if the number of workers follows the room. If new workers do not start,
        `refused` is called and it is not tried again: the present workers suffice."""
        if self._settings.parallelize is not None or self.speeds.fixed:
            return
        more = self.backend.room()
        if more <= 0:
            return
        workers = len(self.infos) + more
        try:
            self.backend.resize(workers)
        except ValueError:  # another user took the room
            return
        except (WorkerStartError, WorkerError) as error:
            self._settings = replace(self._settings, parallelize=len(self.infos))
            refused(more, error)
            return
        self.evaluations = 0
        self.set_speeds(self.speeds.resized(workers))
