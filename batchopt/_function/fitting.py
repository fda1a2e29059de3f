"""The policy of `chunk_size="auto"` for a module on a card: the largest chunks that fit into its memory.

On a card time is lost by small chunks, and none is won: it waits for each of their operations to begin. So memory alone
decides. What samples take is measured by two small chunks; if it is not enough after all, chunks are halved, and the
evaluation is made anew: f is the same, since a sum over samples does not depend on how they are cut.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from batchopt._function.checks import cut_differences
from batchopt._function.settings import Settings
from batchopt._function.sizes import Sizes
from batchopt._machine.device_memory import MEMORY, DeviceMemory
from batchopt._mapreduce.plan import make_plan
from batchopt._mapreduce.speeds import Speeds
from batchopt.errors import WorkerError
from batchopt_workers.functions.inspection import normalises_by_chunk
from batchopt_workers.wire.failures import names_of
from batchopt_workers.wire.orders import Cut, Order

if TYPE_CHECKING:
    from batchopt._function.engine import Engine
    from batchopt._function.step import Step

# Samples of the two chunks by which it is measured: 1/PART of the batch and MORE times as many, at least LEAST.
PART, MORE, LEAST = 256, 4, 32
# Fraction of the free memory that chunks may take: a recorded evaluation has as much again as an eager one, by which it
# is compared.
FRACTION = 0.45

_OUT_OF_MEMORY = names_of((torch.OutOfMemoryError,))


class Fitting:
    """The number of samples that fit, `capacity`; None until it is known."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.capacity: int | None = None
        self._memory = memory
        self._may_cut: bool | None = None  # whether f is the same then; None: a batch has to be looked at
        self._kept = -1  # the step whose chunks are kept

    def size_for(self, samples: int) -> int | None:
        """Return the size of chunks for so many samples, None for one chunk: as few as fit, of equal sizes."""
        if self.capacity is None or samples <= self.capacity:
            return None
        return -(-samples // -(-samples // self.capacity))

    def before(self, engine: Engine) -> None:
        """Measure what samples take, if that is not known and the loaded batch allows it."""
        step = engine.step
        if self.capacity is not None or step is None or step.ended:
            return
        small = max(LEAST, step.batch.size // PART)
        if self._may_cut is None and step.batch.size > 1:
            self._may_cut = not self._depends_on_the_cut(engine, min(small, step.batch.size // 2))
        if not self._may_cut or step.batch.size < 2 * MORE * small:
            return
        self.capacity = sys.maxsize
        try:
            one, more = (self._taken_by(engine, step, size) for size in (small, MORE * small))
        except WorkerError:  # the loss cannot be evaluated on a part of the batch
            return
        each = max(1.0, (more - one) / ((MORE - 1) * small))
        self.capacity = max(LEAST, int((FRACTION * self._memory.free() - max(0.0, one - each * small)) / each))
        self._cut(engine, step)

    def took(self, engine: Engine, seconds: float) -> None:
        """Do nothing: time does not matter here."""

    def keep(self, step: Step) -> None:
        """Keep the chunks of this step, since others would be another function: they draw other random numbers."""
        self._kept = step.number

    def shrinks(self, engine: Engine, error: WorkerError, cut: Cut) -> bool:
        """After an error with this cut tell whether it was lack of memory, and chunks are smaller now."""
        step, largest = engine.step, max(stop - start for start, stop in pairwise(cut.bounds))
        is_kept = step is not None and step.number == self._kept
        if error.kinds[:1] != _OUT_OF_MEMORY or largest == 1 or is_kept or not self._may_cut:
            return False
        self._memory.release()
        self.capacity = largest // 2
        if step is not None:
            self._cut(engine, step)
        return True

    def _cut(self, engine: Engine, step: Step) -> None:
        size = self.size_for(step.batch.size)
        if size != step.chunk_size:
            engine.cut_into(size)
            engine.observers.decided("chunks of %s", "the whole batch" if size is None else f"{size} samples")

    def _taken_by(self, engine: Engine, step: Step, size: int) -> int:
        plan = make_plan(step.batch.size, size, Speeds.unknown(1))

        def evaluate() -> None:
            workers = engine.workers
            workers.backend.evaluate(plan.cut, Order(workers.number(), step.number, 0, 1), [(0, 1)])

        with engine.workers.without_hooks():
            evaluate()
            return self._memory.taken_by(evaluate)

    def _depends_on_the_cut(self, engine: Engine, size: int) -> bool:
        if normalises_by_chunk(engine.subject.module) is not None:
            return True
        return any(difference.decided for difference in cut_differences(engine, size))


def sizes_of(settings: Settings, device: torch.device) -> Sizes | Fitting | None:
    """Return the policy of the sizes of chunks on a device; None if they are given."""
    if not settings.sizes_chunks or settings.deterministic:
        return None
    memory = MEMORY.get(device.type)
    return Sizes() if memory is None else Fitting(memory(device))
