"""The way in which an engine evaluates, where that is up to measured times: workers, threads, devices, chunks.

    took ───► Search: what to try next, and what was fastest                                (numbers only)
    before ─► Tuner: changes to that, if f and df/dX are the same there

What must hold: a way is timed only after it has found the f and df/dX of the present one at the same X. So whatever
depends on the cut, on the process or on the device shows where it is used; `check()` says what it is. The way in use is
the `present` one of the search, which is changed after the comparison: where an interrupt comes between, it is returned
to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from batchopt._engine.checks import COARSE, TOLERANCES, cut_differences
from batchopt._engine.evaluating import Evaluating
from batchopt._engine.search import FEW, Search, Way
from batchopt._engine.settings import Settings
from batchopt._engine.step import Step
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.plan import Plan, make_plan, plan_of
from batchopt._mapreduce.reduce import reduce_answers, weighed
from batchopt._mapreduce.speeds import Speeds
from batchopt.backends import backend_class
from batchopt.errors import BatchoptError, WorkerError
from batchopt_workers.functions.inspection import normalises_by_chunk
from batchopt_workers.wire.failures import names_of
from batchopt_workers.wire.orders import Cut, Order
from batchopt_workers.wire.structures import all_finite

# It is chosen again after AGAIN batches in a row whose size differs by this factor.
OTHER_SIZE, AGAIN = 4, 3
# Pieces of a worker's share that are tried as chunks, and the samples that a chunk has at least.
PIECES, LEAST = (4, 16), 32
# The tolerance of df/dX in that of f: its terms cancel, more so near a minimum.
CANCELLED = 10
_CANNOT = BatchoptError, OSError, TypeError, ValueError
_OUT_OF_MEMORY = names_of((torch.OutOfMemoryError,))


class Tuner:
    """Has an engine evaluate in the ways that its search asks for. On a card it halves chunks that do not fit."""

    def __init__(self, engine: Evaluating) -> None:
        self._way: Way | None = engine.workers.way  # in use; None while that changes
        self._given = engine.settings.chunk_size
        self._capacity: int | None = None  # samples of the largest chunk that fits on a card
        self._may_halve = False if engine.subject.x.is_cpu else None  # as f is the same; None: that is not known yet
        self._size, self._others = 0, 0  # samples of a batch, and how many batches since had another size
        self._begin(engine, engine.settings.automatic)

    def _begin(self, engine: Evaluating, automatic: bool) -> None:
        """Choose anew; the workers only if that is to be `automatic`."""
        found = ladders(engine.settings) if automatic else []
        self._keep(engine, found[-1][0] if automatic else engine.workers.way, "measured", found)
        self._sizes = engine.settings.sizes_chunks and engine.subject.x.is_cpu  # sizes of chunks are still to be tried
        self._seconds = 0.0  # of loading and reading since the last evaluation
        self._starts = False  # the start of workers is being prepared

    def _keep(self, engine: Evaluating, way: Way, reason: str, ladders: Sequence[Sequence[Way]] = ()) -> None:
        """Keep this way for that reason, but try those of the ladders."""
        x = engine.subject.x
        self.search = Search(way, ladders, x.numel() * x.element_size(), reason)
        self._resumed: Way | None = None  # another run's choice, which was not tried yet
        self.is_settled = False  # nothing is left to be tried

    # ---- what is timed

    def waited(self, seconds: float) -> None:
        """Count the time that reading or loading the next batch took."""
        self._seconds += seconds

    def loaded(self, engine: Evaluating, size: int, seconds: float) -> None:
        """Count a batch of this size, and the time that loading it took; choose again if their size has changed for
        good."""
        self._seconds, self._size = self._seconds + seconds, self._size or size
        is_other = not self._size / OTHER_SIZE < size < self._size * OTHER_SIZE
        self._others = self._others + 1 if is_other else 0
        if self._others >= AGAIN:
            self._size, self._others = size, 0
            if self.search.times:
                self._begin(engine, engine.settings.automatic)

    def took(self, engine: Evaluating, seconds: float) -> None:
        """Count the time of an evaluation, which may decide."""
        search, seconds, self._seconds = self.search, seconds + self._seconds, 0.0
        if not search.is_over and not self._others and self._way == search.present:  # else it could not change yet
            search.took(seconds)
            self._conclude(engine)

    def _conclude(self, engine: Evaluating) -> None:
        """Go on with the sizes of chunks once nothing else is left to be tried; then say what was chosen."""
        search, step = self.search, engine.step
        if search.is_over and self._sizes and step is not None:
            self._sizes, share = False, -(-step.batch.size // len(engine.workers.infos))
            sizes = [-(-share // pieces) for pieces in PIECES if share >= LEAST * pieces]
            search.add([search.present, *(search.present._replace(chunk_size=size) for size in sizes)])
        if search.is_over and not self.is_settled:
            self.is_settled = True
            if search.times:
                engine.observers.decided("evaluations are by %s", search)

    # ---- what is tried

    def before(self, engine: Evaluating) -> None:
        """Change to the way that is to be tried, or was chosen, if the loaded batch allows it."""
        search, step = self.search, engine.step
        if self.is_settled and self._way == search.present and self._may_halve is not None:
            return
        if step is None or step.ended:
            return
        is_whole = step.plan.cut.chunks == 1 and search.present.is_here and search.present.chunk_size is None
        if step.drew and not (is_whole or engine.settings.fixed_bits):  # other chunks would draw other random numbers
            return
        if self._may_halve is None and step.batch.size > 1:
            found = [one.decided for one in cut_differences(engine, step.batch.size)]
            self._may_halve = normalises_by_chunk(engine.subject.module) is None and not any(found)
        self._use(engine, search.present)  # also where an interrupt came between
        way = self._resumed or search.due
        if way is not None and (way in search.unknown or self._can_start(engine, way)):
            self._try(engine, way)
        self._use(engine, self.search.present)
        self._conclude(engine)

    def _can_start(self, engine: Evaluating, way: Way) -> bool:
        """Begin the preparation of these workers; tell whether it is complete."""
        if way.is_here or way[:3] == engine.workers.way[:3]:
            return True
        try:
            if not self._starts:
                engine.workers.anticipate(way)
            self._starts = not engine.workers.can_start()
        except _CANNOT as error:
            self._refuse(engine, way, f"workers cannot start: {error}")
            return False
        return not self._starts

    def _try(self, engine: Evaluating, way: Way) -> None:
        """Go over to a way if f and df/dX are the same there; of workers of which nothing is known, time shares, if
        they are the same in their chunks."""
        step, search, reason = engine.loaded(), self.search, ""
        try:
            here = _values(engine, step.plan.cut)
        except WorkerError:  # which may mean an infinite loss
            return search.postpone()
        if not (math.isfinite(here[0]) and all_finite(here[1])):
            return search.postpone()
        try:
            if way not in search.unknown:
                self._use(engine, way)
                reason = _difference(here, _values(engine, engine.loaded().plan.cut))
            elif (cut := _plan_for(step, way).cut) != step.plan.cut:
                reason = _difference(here, _values(engine, cut))
        except _CANNOT as error:
            reason = f"it cannot be evaluated there: {error}"
        if reason:
            engine.step = step  # also where workers could not load it
            self._refuse(engine, way, reason)
        elif way in search.unknown:
            for one in search.unknown:
                search.share_took(one, _seconds_of_share(engine, one))
        elif way == self._resumed:
            self._keep(engine, way, "resumed")
        else:
            search.begin(way)

    def _refuse(self, engine: Evaluating, way: Way, reason: str) -> None:
        if way == self._resumed:
            self._resumed = None
        else:
            self.search.refuse(way, reason)
        engine.observers.decided("evaluations are not by %s: %s", way, reason)

    def _use(self, engine: Evaluating, way: Way) -> None:
        """Evaluate in this way, also the loaded batch."""
        if way == self._way:
            return
        before, self._way, began = self._way, None, time.perf_counter()
        if before is None or before[:3] != way[:3]:
            engine.use(way, engine.step)
        if engine.step is not None and engine.step.chunk_size != way.chunk_size and not engine.settings.fixed_bits:
            engine.cut_into(way.chunk_size)
        self._way = way
        engine.observers.did("parallelize", began)

    # ---- chunks

    def size_for(self, samples: int) -> int | None:
        """Return the size of chunks for so many samples, None for a worker's share."""
        if self._capacity is None or samples <= self._capacity:
            return self._given or self.search.present.chunk_size
        return -(-samples // -(-samples // self._capacity))

    def shrinks(self, engine: Evaluating, error: WorkerError, cut: Cut) -> bool:
        """After an error with this cut tell whether it was lack of memory on a card, and chunks are half as large."""
        step, largest = engine.step, max(stop - start for start, stop in pairwise(cut.bounds))
        if error.kinds[:1] != _OUT_OF_MEMORY or largest == 1 or not self._may_halve or (step and step.drew):
            return False
        torch.cuda.empty_cache()
        self._capacity = largest // 2
        if step is not None:
            size = self.size_for(step.batch.size)
            engine.cut_into(size)
            engine.observers.decided("chunks of %s samples, as larger ones do not fit", size)
        return True

    # ---- what the user decides

    def freeze_workers(self, engine: Evaluating) -> None:
        """Keep the workers from now on, as they were chosen, or else one for each device or core: they may have state
        of the user's."""
        if engine.settings.automatic:
            search = self.search
            chosen = search.present if search.is_over else ladders(engine.settings)[0][-1]
            if not search.is_over and engine.settings.sizes_chunks and not self._sizes:
                chosen = search.best  # only the sizes of chunks were still to be tried
            self._keep(engine, self._resumed or chosen, "workers may have state")
            self._use(engine, self.search.present)

    def resized(self, engine: Evaluating, automatic: bool) -> None:
        """Keep the number of workers, which the user has changed; choose again if that is to be `automatic`."""
        if engine.settings.automatic and engine.workers.alone:  # with the threads that were asked for, not a worker's
            engine.use(Way(1, engine.settings.threads_per_worker))
        self._way = engine.workers.way
        self._begin(engine, automatic)

    def state(self) -> dict[str, Any]:
        """Return the way that was chosen, as plain data under the name `parallelize`; nothing as long as none was."""
        if self._resumed is None and not self.search.is_over:
            return {}
        workers, threads, devices, _ = self._resumed or self.search.present
        found = {"workers": workers, "threads": threads, "devices": [*map(str, devices)], "samples": self._size}
        return {"parallelize": found}

    def resume(self, state: Mapping[str, Any], settings: Settings) -> None:
        """Try what another run has chosen before anything else, if there are the cores or devices, and such threads."""
        devices = tuple(map(torch.device, state.get("devices", ())))
        way = Way(state["workers"], state["threads"], devices)
        fits = {*devices} <= {*settings.candidates} and (devices or way.workers * (way.threads or 1) <= usable_cores())
        if fits and settings.threads_per_worker in (None, way.threads):
            self._resumed, self._size, self.is_settled = way, state["samples"], False


def ladders(settings: Settings) -> list[list[Way]]:
    """Return the ways that come into question: devices, workers on all cores, and this process, then with fewer
    threads."""
    cores = min(usable_cores(), backend_class(settings.backend).read_workers("auto") or 1)
    threads, devices = settings.threads_per_worker, settings.candidates
    most = cores // (threads or 1)
    several = [most >> halved for halved in range(most.bit_length() - 1)]
    fewer = [cores >> halved for halved in range(1, cores.bit_length())] if threads is None else []
    on_devices = [[Way(count, threads, devices[:count]) for count in sorted({1, len(devices)})]] if devices else []
    on_cores = [[Way(count, threads or cores // count)] for count in several]
    return [*on_devices, *on_cores, [Way(1, count) for count in (threads, *fewer)]]


def _plan_for(step: Step, way: Way) -> Plan:
    return make_plan(step.batch.size, step.chunk_size, Speeds.unknown(way.workers))


def _values(engine: Evaluating, cut: Cut) -> tuple[float, torch.Tensor]:
    """Return f and df/dX of these chunks by the present workers, which counts as no evaluation."""
    step, gradient = engine.current_step(), torch.empty_like(engine.subject.x)
    with engine.workers.without_hooks():
        answers = engine.workers.evaluate(step._replace(plan=plan_of(cut, engine.workers.speeds)))
        whole = reduce_answers(answers, cut.chunks, gradient)
    return weighed(whole.losses, step.weights), gradient


def _difference(here: tuple[float, torch.Tensor], there: tuple[float, torch.Tensor]) -> str:
    """Say that f or df/dX differs, and what it may be; nothing if they are the same but for rounding."""
    (f, gradient), (other, another) = here, there
    tolerance = TOLERANCES.get(gradient.dtype, COARSE)
    off, size = float((another - gradient).abs().max()), float(gradient.abs().max())
    if abs(other - f) <= tolerance * abs(f) and off <= CANCELLED * tolerance * size:
        return ""
    return (
        f"f or df/dX is another one there, f {other:.9g} and not {f:.9g}: does it depend on how the batch is cut, on "
        "files or globals, draw random numbers, or use TF32? opt.check() says more"
    )


def _seconds_of_share(engine: Evaluating, way: Way) -> float:
    """Return what the largest share of these workers takes in this process, with a worker's threads."""
    step, workers, found = engine.loaded(), engine.workers, []
    plan = _plan_for(step, way)
    first, last = max(plan.runs, key=lambda run: run[1] - run[0])
    with workers.without_hooks(), workers.with_threads(way.threads):
        for _ in range(FEW):
            began = time.perf_counter()
            workers.backend.evaluate(plan.cut, Order(workers.number(), step.number, first, last), [(first, last)])
            found.append(time.perf_counter() - began)
    return min(found)
