"""`parallelize="auto"`: measures what `Choice` asks for, and has an engine follow its decisions between evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from batchopt._function.checks import cut_differences, refuse_frequencies
from batchopt._function.choice import Choice, Phase
from batchopt._function.costs import Configuration
from batchopt._function.settings import Settings
from batchopt._function.step import Step
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.plan import Plan, make_plan, plan_of
from batchopt._mapreduce.reduce import reduce_answers, weighed
from batchopt._mapreduce.speeds import Speeds
from batchopt._program.flat_module import FlatModule
from batchopt.backends import backend_class
from batchopt.errors import BatchoptError, WorkerError
from batchopt_workers.functions.inspection import normalises_by_chunk
from batchopt_workers.wire.orders import Cut, Order

if TYPE_CHECKING:
    from batchopt._function.engine import Engine
    from batchopt._function.workers import Workers

# The choice is made again after AGAIN batches in a row whose size differs by this factor.
OTHER_SIZE, AGAIN = 4, 3
# Relative differences of f between this process and workers that are rounding, in single and in double precision.
_TOLERANCE = 1e-3, 1e-6
# Errors by which workers cannot be used.
_CANNOT = BatchoptError, OSError, TypeError, ValueError


class Auto:
    """The policy of an engine that evaluates in this process, or by workers where they were measured to be faster. The
    engine reports what is to be timed, and asks before each evaluation."""

    def __init__(self, subject: FlatModule, settings: Settings) -> None:
        """Begin in this process."""
        room, x = backend_class(settings.backend).read_workers("auto") or 1, subject.x
        cores, threads = min(usable_cores(), room), settings.threads_per_worker
        self.choice = Choice(cores, threads, x.numel() * x.element_size(), settings.candidates)
        self._present = self.choice.configuration
        self._seconds = 0.0  # of loading and reading since the last evaluation
        self._size, self._others = 0, 0  # samples of a batch, and how many batches since had another size
        self._is_fresh = False  # the loaded batch was not evaluated yet
        self._starts = False  # the start of workers is being prepared
        self._is_compared = True  # f of the present configuration with that of this process

    # ---- what is timed

    def waited(self, seconds: float) -> None:
        """Count the time that reading the next batch took."""
        self._seconds += seconds

    def loaded(self, size: int, seconds: float) -> None:
        """Count the time that loading a batch of this size took; choose again if their size has changed for
        good."""
        self._size = self._size or size
        is_other = not self._size / OTHER_SIZE < size < self._size * OTHER_SIZE
        self._others = self._others + 1 if is_other else 0
        if self._others >= AGAIN:
            self._size, self._others = size, 0
            if self.choice.outlook.times:
                self.choice.begin()
        self._seconds, self._is_fresh = self._seconds + seconds, True

    def took(self, engine: Engine, seconds: float) -> None:
        """Count the time of an evaluation, which may decide."""
        choice, seconds = self.choice, seconds + self._seconds
        self._seconds, self._is_fresh = 0.0, False
        if self._others or choice.configuration != self._present:  # it could not change yet
            return
        before = choice.phase
        choice.took(seconds)
        self._report(engine, before)

    # ---- changing the configuration

    def before(self, engine: Engine) -> None:
        """Do what the choice asks for next, if the loaded batch allows it."""
        choice, step, before = self.choice, engine.step, self.choice.phase
        if before is Phase.CHOSEN and choice.configuration == self._present and self._is_compared:
            return
        if step is None or step.ended:
            return
        if not self._is_compared:  # an interrupt came between: from this process it is compared again
            self._use(engine, choice.outlook.alone)
            step, self._is_compared = engine.loaded(), True
        if choice.is_due:
            self._probe(engine, step)
        # In a step that has begun, and draws random numbers, another number of chunks would be another f.
        movable = self._is_fresh or step.movable or step.chunk_size is not None
        following = choice.next(self._present, movable, choice.pays and self._can_start(engine))
        if following is not None:
            self._change(engine, following, step)
        self._report(engine, before)

    def _report(self, engine: Engine, before: Phase) -> None:
        """Say what was chosen, if that was decided since."""
        choice = self.choice
        if choice.phase is Phase.CHOSEN is not before:
            engine.observers.decided("parallelize='auto' is %s: %s", choice.configuration, choice.reason)

    def _probe(self, engine: Engine, step: Step) -> None:
        """Time a worker's share of the batch, unless there is a reason not to cut that."""
        try:
            reason = self._reason_against(engine, step)
            if reason is not None:
                self.choice.refuse(reason)
            elif self.choice.share.devices:
                self.choice.allow()
            else:
                self.choice.probed(*self._seconds_of_a_share(engine, step))
        except WorkerError as error:  # the loss cannot be evaluated on part of the batch
            self.choice.refuse(f"a part of the batch cannot be evaluated: {error}")

    def _reason_against(self, engine: Engine, step: Step) -> str | None:
        """Return why the batch is not to be cut for workers; None if there is no reason."""
        share, module = self.choice.share, engine.subject.module
        try:
            refuse_frequencies(module, share.workers, step.batch, share.workers)
        except ValueError as error:
            return str(error)
        if step.chunk_size is not None:
            return None
        if normalises_by_chunk(module) is not None:
            return "the module normalises by the statistics of a chunk"
        if not engine.settings.check_cut:
            return None
        found = cut_differences(engine, -(-step.batch.size // share.workers))
        decided = any(difference.decided for difference in found)
        return "the loss depends on how the batch is cut" if decided else None

    def _seconds_of_a_share(self, engine: Engine, step: Step) -> tuple[float, float | None]:
        """Time the evaluation of a worker's share in this process, with a worker's threads; and of half of one that
        long, where that tells something about other numbers of workers and samples can be shared as one likes."""
        several, share = engine.workers, self.choice.share
        found = []
        with several.without_hooks(), several.with_threads(share.threads):
            for parts in (share.workers, 2 * share.workers):
                plan = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(parts))
                found.append(_seconds_of(several, step.number, plan))
                if share.workers == 2 or step.chunk_size is not None:
                    return found[0], None
        return found[0], found[1]

    def _can_start(self, engine: Engine) -> bool:
        """Begin the preparation of the workers that are wanted; tell whether it is complete."""
        wanted = self.choice.wanted
        try:
            if not wanted.is_here and not self._starts:
                engine.workers.anticipate(wanted)
            self._starts = not wanted.is_here and not engine.workers.can_start()
        except _CANNOT as error:
            self.choice.fail(wanted, f"workers cannot start: {error}", self._present)
            return False
        return not self._starts

    def _change(self, engine: Engine, configuration: Configuration, step: Step) -> None:
        """Use another configuration, for the loaded batch too; the fastest one so far if that cannot evaluate it, or
        finds another f than the present one."""
        if configuration.is_here:
            self._use(engine, configuration)
            return
        before, reason = self._present, ""
        try:
            # the same chunks in both, since each draws its own random numbers
            cut = make_plan(step.batch.size, step.chunk_size, Speeds.unknown(configuration.workers)).cut
            here = _f(engine, step, cut)
            self._is_compared = False
            self._use(engine, configuration)
            there = _f(engine, engine.ready(), cut)
            tolerance = _TOLERANCE[engine.subject.x.dtype.itemsize > 4]
            if math.isfinite(here) and not abs(there - here) <= tolerance * abs(here):  # also where that is NaN
                reason = _different(configuration, there, here)
        except _CANNOT as error:
            reason = f"workers cannot evaluate this: {error}"
        if reason:
            if configuration.devices:
                engine.observers.decided("parallelize='auto' does not use %s: %s", configuration, reason)
            self.choice.fail(configuration, reason, before)
            engine.step = step  # also where workers could not load it
            self._use(engine, self.choice.configuration)
        self._is_compared = True

    def _use(self, engine: Engine, configuration: Configuration) -> None:
        began = time.perf_counter()
        engine.use(configuration, engine.step)
        self._present = configuration
        engine.observers.did("parallelize", began)

    # ---- what the user decides

    def freeze_workers(self, engine: Engine) -> None:
        """Keep the workers from now on, as they were chosen, or else one for each device or core: they may have state
        of the user's."""
        outlook = self.choice.outlook
        if self.choice.phase is not Phase.CHOSEN:
            found = [*outlook.on_devices[-1:], *outlook.several[:1], outlook.alone]
            self.choice.choose("workers may have state", found[0])
        if self.choice.configuration != self._present:
            self._use(engine, self.choice.configuration)
        self._is_compared = True
        outlook.times.clear()

    def resized(self, engine: Engine, automatic: bool) -> None:
        """Keep the number of workers, which the user has changed; choose again if that is to be `automatic`."""
        if engine.workers.alone:  # with the threads that were asked for, not a worker's
            engine.use(self.choice.outlook.alone)
        self._present, self._is_compared = engine.workers.configuration, True
        if automatic:
            self.choice.begin()
        else:
            self.choice.outlook.times.clear()
            self.choice.choose("resize()", self._present)

    def state(self) -> dict[str, Any]:
        """Return the configuration that was chosen, as plain data under the name `parallelize`; nothing as long as
        none was."""
        if self.choice.phase is not Phase.CHOSEN:
            return {}
        chosen = self.choice.configuration
        devices = [*map(str, chosen.devices)]
        return {"parallelize": {**chosen._asdict(), "devices": devices, "samples": self._size}}

    def resume(self, state: Mapping[str, Any], given: int | None) -> None:
        """Use the configuration that another run has chosen, if it fits the threads that were `given`, and the devices
        that may be used here."""
        devices = tuple(map(torch.device, state.get("devices", ())))
        configuration, samples = Configuration(state["workers"], state["threads"], devices), int(state["samples"])
        on_cores = not devices and 0 < configuration.workers * (configuration.threads or 1) <= usable_cores()
        fits = on_cores or configuration in self.choice.outlook.on_devices
        if fits and given in (None, configuration.threads):
            self.choice.choose("resumed", configuration)
            self._size = samples


def _different(configuration: Configuration, there: float, here: float) -> str:
    """Say that f differs, and what it may be."""
    if configuration.devices:
        return f"f is {there:.9g} there, not {here:.9g}: does it draw random numbers, or use TF32?"
    return "workers compute something else than this process: opt.check() with parallelize=2 says more"


def _seconds_of(workers: Workers, step: int, plan: Plan) -> float:
    """Return what the longest run of a plan takes in this process."""
    first, last = max(plan.runs, key=lambda run: run[1] - run[0])
    found: list[float] = []

    def run() -> Sequence[Answer]:
        return workers.backend.evaluate(plan.cut, Order(workers.number(), step, first, last), [(first, last)])

    while len(found) < (2 if found and found[0] > 0.05 else 3) or (len(found) < 6 and found[-1] < 0.005):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return median(found[1:])


def _f(engine: Engine, step: Step, cut: Cut) -> float:
    """Return f of these chunks by the present configuration, which counts as no evaluation."""
    plan = plan_of(cut, engine.workers.speeds)
    answers = engine.workers.evaluate(step._replace(plan=plan))
    whole = reduce_answers(answers, cut.chunks, torch.empty_like(engine.subject.x))
    return weighed(whole.losses, step.weights)
