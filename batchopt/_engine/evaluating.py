"""An engine as its parts see it: those that check, tune, compile, prepare and undo what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from batchopt._data.batches import BatchSpecs
from batchopt._engine.observers import Observers
from batchopt._engine.reader import BatchReader
from batchopt._engine.search import Way
from batchopt._engine.settings import Settings
from batchopt._engine.step import Past, Step
from batchopt._engine.workers import Workers
from batchopt._machine.ownership import Owner
from batchopt._mapreduce.answers import Answer
from batchopt._program.flat_module import FlatModule
from batchopt.backends.base import Prepared
from batchopt_workers.batch.batch import Batch
from batchopt_workers.functions.task import Task
from batchopt_workers.wire.orders import Cut, Kind

T = TypeVar("T")


class Evaluating(Protocol):
    """Evaluates f of the loaded batch on workers: see `Engine`, which it is."""

    subject: FlatModule
    settings: Settings
    workers: Workers
    reader: BatchReader
    observers: Observers
    past: Past
    step: Step | None
    begun: Past | None

    @property
    def owner(self) -> Owner:
        """The owner, to which one caller at a time belongs."""

    @property
    def specs(self) -> BatchSpecs:
        """The rules by which data becomes a batch."""

    def current_step(self) -> Step:
        """Return the step on the loaded batch, with X up to date."""

    def loaded(self) -> Step:
        """Return the step on the loaded batch."""

    def prepare_ahead(self, inputs: Any, targets: Any, options: Any) -> Prepared:
        """Read a batch, and place it where workers can read it; the loaded one stays."""

    def waited(self, seconds: float) -> None:
        """Count the time that reading the next batch took."""

    def use(self, way: Way, step: Step | None = None) -> None:
        """Evaluate by other workers, and continue this step there."""

    def cut_into(self, chunk_size: int | None) -> None:
        """Evaluate the loaded batch in chunks of this size from now on, as the same step."""

    def run_task_amid(
        self, task: Task, batch: Batch, kind: Kind, use: Callable[[Sequence[Answer], Cut], T], cut: Cut | None = None
    ) -> T:
        """Order a task on `batch` and return `use(answers, cut)`."""

    def put_together(self, answers: Sequence[Answer], cut: Cut, samples: int) -> Any:
        """Return the rows written by the workers, in sample order."""
