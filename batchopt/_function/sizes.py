"""The policy of `chunk_size="auto"`: it times a worker's share whole, in four and in sixteen pieces, and keeps the
fastest size.

Smaller chunks find in the cache what the operation before has left there, and take less memory; each costs the time of
calling its operations. So the size is a matter of the processor and of the function, and is measured once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchopt._function.checks import cut_differences
from batchopt._function.choice import Phase as Choosing
from batchopt._function.compilation import Stage
from batchopt_workers.functions.inspection import normalises_by_chunk

if TYPE_CHECKING:
    from batchopt._function.engine import Engine
    from batchopt._function.step import Step
    from batchopt.errors import WorkerError
    from batchopt_workers.wire.orders import Cut

# Pieces of a worker's share, in the order in which they are tried.
PIECES = (1, 4, 16)
# Samples that a chunk has at least, and evaluations by which a size is timed; the first one does not count.
LEAST, TIMED = 32, 4
# Fraction of the time of larger chunks below which smaller ones are used.
GAIN = 0.97


class Sizes:
    """The size of chunks: `present`, None for a worker's share, until it is `chosen`."""

    def __init__(self) -> None:
        self.present: int | None = None
        self.chosen = False
        self._seconds: list[float] = []  # of evaluations with the present size
        self._best: tuple[float, int | None] = math.inf, None  # seconds, and the size
        self._tried = 0

    def size_for(self, samples: int) -> int | None:
        """Return the size of chunks for so many samples, None for a worker's share."""
        return self.present

    def before(self, engine: Engine) -> None:
        """Try the next size, if the present one was timed and the loaded batch allows it."""
        step = engine.step
        if self.chosen or step is None or step.ended or len(self._seconds) < TIMED:
            return
        seconds, self._seconds = min(self._seconds[1:]), []
        self._tried += 1
        is_faster = seconds < GAIN * self._best[0]
        if is_faster:
            self._best = seconds, self.present
        share = -(-step.batch.size // len(engine.workers.infos))
        size = -(-share // PIECES[self._tried]) if self._tried < len(PIECES) else 0
        if is_faster and size >= LEAST and not self._depends_on_the_cut(engine, size):
            self._use(engine, size)
            return
        self._use(engine, self._best[1])
        self.chosen = True
        what = "a worker's share" if self.present is None else f"{self.present} samples"
        engine.observers.decided("chunks of %s", what)

    def took(self, engine: Engine, seconds: float) -> None:
        """Count the time of an evaluation, unless something else is being measured."""
        settled = engine.policies.auto is None or engine.policies.auto.choice.phase is Choosing.CHOSEN
        compiled = engine.policies.compilation is None or engine.policies.compilation.phase in (
            Stage.EAGER,
            Stage.COMPILED,
        )
        if not self.chosen and settled and compiled:
            self._seconds.append(seconds)

    def keep(self, step: Step) -> None:
        """Keep the present size, since other chunks would be another function: they draw other random numbers."""
        self.chosen = True

    def shrinks(self, engine: Engine, error: WorkerError, cut: Cut) -> bool:
        """After an error, tell whether chunks are smaller now: never, since their size is a matter of speed here."""
        return False

    def _depends_on_the_cut(self, engine: Engine, size: int) -> bool:
        if self.present is not None:  # it was looked at before
            return False
        if normalises_by_chunk(engine.subject.module) is not None:
            return True
        return any(difference.decided for difference in cut_differences(engine, size))

    def _use(self, engine: Engine, size: int | None) -> None:
        if size != self.present:
            self.present = size
            engine.cut_into(size)
