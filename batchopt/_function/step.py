"""The loaded batch, and how it is evaluated until the next one is loaded."""

from __future__ import annotations

from typing import NamedTuple

from batchopt._mapreduce.plan import Plan, follow
from batchopt._mapreduce.speeds import Speeds
from batchopt_workers.batch import Batch


class Step(NamedTuple):
    """One batch. Random draws depend on its `number`; its terms count in f with `weights`.

    `chunk_size` None: chunks are as large as the workers' speeds make them. `movable`: whether shares may change while
    the batch is evaluated; not where that would change f, or cost more than it gains.
    """

    number: int
    batch: Batch
    weights: tuple[float, ...]
    chunk_size: int | None
    plan: Plan
    movable: bool = True

    def followed(self, speeds: Speeds) -> Step:
        """The same for the next evaluation: with another plan if `speeds` make one noticeably faster."""
        plan = follow(self.plan, self.chunk_size, speeds) if self.movable else self.plan
        return self if plan is self.plan else self._replace(plan=plan)
