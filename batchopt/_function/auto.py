"""A function that chooses its number of workers and their threads: `parallelize="auto"`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from statistics import median
from typing import Any

import torch

from batchopt._function.checks import refuse_frequencies
from batchopt._function.choice import Choice, Configuration, Phase
from batchopt._function.function import BatchFunction
from batchopt._function.loader import Planned
from batchopt._function.prepared import PreparedBatch
from batchopt._function.settings import Settings
from batchopt._function.step import Counters, Step
from batchopt._machine.cores import usable_cores
from batchopt._machine.ownership import exclusive, undisturbed
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.plan import make_plan, plan_of
from batchopt._mapreduce.reduce import reduce_answers, weighed
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flat_module import FlatModule
from batchopt.backends import backend_class
from batchopt.backends.base import Prepared
from batchopt.errors import BatchoptError, WorkerError
from batchopt_workers.process.messages import Cut, Order
from batchopt_workers.tasks.inspection import normalises_by_chunk
from batchopt_workers.worker import Hook

# The choice is made again after AGAIN batches in a row whose size differs by this factor.
OTHER_SIZE, AGAIN = 4, 3
# Relative differences of f between this process and workers that are rounding, in single and in double precision.
_TOLERANCE = 1e-3, 1e-6


class AutoFunction(BatchFunction):
    """Evaluates in this process, or by workers where they were measured to be faster; see `Choice`."""

    def __init__(self, subject: FlatModule, settings: Settings, counters: Counters | None = None) -> None:
        super().__init__(subject, settings, counters)
        x = subject.x
        room = backend_class(settings.backend).read_workers("auto") or 1
        self._choice = Choice(min(usable_cores(), room), settings.threads_per_worker, x.numel() * x.element_size())
        self._present = self._choice.configuration
        self._seconds = 0.0  # of loading and reading since the last evaluation
        self._size, self._others = 0, 0  # samples of a batch, and how many batches since had another size
        self._is_fresh = False  # the loaded batch was not evaluated yet
        self._starts = False  # the start of workers is being prepared
        self._is_paused = False

    @property
    def choice(self) -> Mapping[str, Any] | None:
        """The configuration that was chosen, as plain data; None as long as none was."""
        if self._choice.phase is not Phase.CHOSEN:
            return None
        return {"workers": self._present.workers, "threads": self._present.threads, "samples": self._size}

    # ---- what is timed

    @exclusive
    def evaluate(
        self,
        map: Callable[[], Sequence[Answer]] | None = None,
        reduce: Callable[[Sequence[Answer]], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Evaluate f, and note the time."""
        if self._is_paused:
            return super().evaluate(map, reduce)
        if self._choice.phase is not Phase.CHOSEN or self._choice.configuration != self._present:
            self._follow_choice()
        began = time.perf_counter()
        loss = super().evaluate(map, reduce)
        seconds, self._seconds, self._is_fresh = time.perf_counter() - began + self._seconds, 0.0, False
        if not self._others and self._choice.configuration == self._present:  # else it could not change yet
            before = self._choice.phase
            self._choice.took(seconds)
            if self._choice.phase is not before:
                self._report()
        return loss

    def _report(self) -> None:
        if self._choice.phase is Phase.CHOSEN:
            self._reporter.chosen(self._choice.configuration, self._choice.reason)

    def begin(self, prepared: Prepared, rows: Any = lambda: None) -> None:
        """Begin a step on a prepared batch."""
        if self._is_paused:
            return super().begin(prepared, rows)
        began, size = time.perf_counter(), prepared.batch.size
        self._size = self._size or size
        is_other = not self._size / OTHER_SIZE < size < self._size * OTHER_SIZE
        self._others = self._others + 1 if is_other else 0
        if self._others >= AGAIN:
            self._size, self._others = size, 0
            if self._choice.times:
                self._choice.begin()
        super().begin(prepared, rows)
        self._seconds, self._is_fresh = self._seconds + time.perf_counter() - began, True

    def prepared(self, batches: Iterable[Any]) -> Generator[PreparedBatch, None, None]:
        """Yield each of `batches`, prepared."""
        with closing(super().prepared(batches)) as found:
            while True:
                began = time.perf_counter()
                batch = next(found, None)
                self._seconds += time.perf_counter() - began
                if batch is None:
                    return
                yield batch

    @contextmanager
    def under_examination(self) -> Iterator[None]:
        """Let evaluations in the body leave no trace."""
        self._is_paused = True
        try:
            with super().under_examination():
                yield
        finally:
            self._is_paused = False

    # ---- changing the configuration

    @undisturbed
    def _follow_choice(self) -> None:
        """Do what the choice asks for next, if the loaded batch allows it."""
        choice, step, before = self._choice, self._step, self._choice.phase
        if step is None or self._ended or self.subject.buffers.is_written:
            return
        if choice.is_due:
            self._probe(step)
        if choice.pays and self._can_start():
            choice.try_workers()
        # In a step that has begun, and draws random numbers, another number of chunks would be another f.
        if choice.configuration != self._present and (self._is_fresh or step.movable or step.chunk_size is not None):
            self._change(choice.configuration, step)
        if choice.phase is not before:
            self._report()

    def _probe(self, step: Step) -> None:
        """Time a worker's share of the batch, unless there is a reason not to cut that."""
        try:
            reason = self._reason_against(step)
            if reason is None:
                self._choice.probed(self._seconds_of_a_share(step))
            else:
                self._choice.choose(reason)
        except WorkerError as error:  # of a loss that is none of a part of the batch
            self._choice.choose(f"a part of the batch cannot be evaluated: {error}")

    def _reason_against(self, step: Step) -> str | None:
        """Return why the batch is not to be cut for workers; None if there is no reason."""
        share, module = self._choice.share, self.subject.module
        try:
            refuse_frequencies(module, share.workers, step.batch, share.workers)
        except ValueError as error:
            return str(error)
        if step.chunk_size is not None:
            return None
        if normalises_by_chunk(module) is not None:
            return "the module normalises by the statistics of a chunk"
        if not self.settings.check_cut:
            return None
        largest = -(-step.batch.size // share.workers)
        decided = any(difference.decided for difference in self.cut_differences(largest))
        return "the loss depends on how the batch is cut" if decided else None

    def _seconds_of_a_share(self, step: Step) -> float:
        """Time the evaluation of a worker's share in this process, with a worker's threads."""
        workers, share = self.workers, self._choice.share
        plan = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(share.workers))
        first, last = max(plan.runs, key=lambda run: run[1] - run[0])
        found: list[float] = []

        def run() -> Sequence[Answer]:
            order = Order(workers.number(), step.number, first, last)
            return workers.backend.evaluate(plan.cut, order, [(first, last)])

        with self._at_start(), workers.without_hooks(), workers.with_threads(share.threads):
            while len(found) < (2 if found and found[0] > 0.05 else 3) or (len(found) < 6 and found[-1] < 0.005):
                began = time.perf_counter()
                workers.learning(run)
                found.append(time.perf_counter() - began)
        return median(found[1:])

    def _can_start(self) -> bool:
        """Begin the preparation of workers; tell whether it is complete."""
        try:
            if not self._starts:
                self.workers.anticipate(*self._choice.share)
            self._starts = not self.workers.can_start()
        except (BatchoptError, OSError, TypeError, ValueError) as error:
            self._choice.choose(f"workers cannot start: {error}")
            return False
        return not self._starts

    def _change(self, configuration: Configuration, step: Step) -> None:
        """Use another configuration, for the loaded batch too; the previous one if workers cannot, or find another f
        than this process."""
        before, reason = self._present, ""
        try:
            # the same chunks in both, since each draws its own random numbers
            cut = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(configuration.workers)).cut
            here = self._f(step, cut)
            self._use(configuration, step)
            there = self._f(self.ready(), cut)
            tolerance = _TOLERANCE[self.subject.x.dtype.itemsize > 4]
            if math.isfinite(here) and not abs(there - here) <= tolerance * abs(here):  # also where that is NaN
                reason = "workers compute something else than this process: opt.check() with parallelize=2 says more"
        except (BatchoptError, OSError, TypeError, ValueError) as error:
            reason = f"workers cannot evaluate this: {error}"
        if reason:
            self._choice.choose(reason, before)
            self._use(before, step)

    def _use(self, configuration: Configuration, step: Step | None) -> None:
        # An interrupt in between leaves no batch: it has to be loaded again.
        self._step = self._planned = self._placed = None
        with self.observers.doing("parallelize"):
            self.use(*configuration)
        self._present = configuration
        backend, speeds = self.workers.backend, self.workers.speeds
        if step is not None:
            self._placed = backend.prepare(step.batch)
            backend.load(self._placed, step.weights)
            plan = make_plan(step.batch.size, step.chunk_size, speeds)
            self._planned = Planned(step.batch.size, step.chunk_size, speeds, plan)
            self._step = step._replace(plan=plan)

    def _f(self, step: Step, cut: Cut) -> float:
        """Return f of these chunks by the present configuration, which counts as no evaluation."""
        with self._at_start():
            answers = self.workers.evaluate(step._replace(plan=plan_of(cut, self.workers.speeds)))
        whole = reduce_answers(answers, cut.chunks, torch.empty_like(self.subject.x))
        return weighed(whole.losses, step.weights)

    # ---- where workers may have state of the user's, their number stays

    def settle(self) -> None:
        """Keep the number of workers from now on: as it was chosen, or one per core."""
        if self._choice.phase is not Phase.CHOSEN:
            self._choice.choose("workers may have state", self._choice.share)
            self._use(self._choice.share, self._step)
        self._choice.times.clear()

    @exclusive
    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these hooks from now on."""
        self.check_open()
        self.settle()
        super().set_hooks(prehook, posthook)

    @exclusive
    def run_on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on each worker; return the values in rank order."""
        self.check_open()
        self.settle()
        return super().run_on_workers(function, *args)

    @exclusive
    def resize(self, parallelize: int | str, speeds: Sequence[float] | None) -> None:
        """Change the number of workers; `"auto"` chooses again."""
        automatic = parallelize == "auto" and speeds is None
        super().resize(1 if automatic else parallelize, speeds)
        if self.workers.alone:  # with the threads that were asked for, not a worker's
            self.use(1, self.settings.threads_per_worker)
        self._present = Configuration(*self.workers.configuration)
        if automatic:
            self._choice.begin()
        else:
            self._choice.times.clear()
            self._choice.choose("resize()", self._present)

    def arrange(self, choice: Mapping[str, Any]) -> None:
        """Use the configuration that another run has chosen."""
        configuration, given = Configuration(choice["workers"], choice["threads"]), self.settings.threads_per_worker
        fits = configuration.workers * (configuration.threads or 1) <= usable_cores()
        if fits and given in (None, configuration.threads):
            self._choice.choose("resumed", configuration)
            self._size = choice["samples"]
