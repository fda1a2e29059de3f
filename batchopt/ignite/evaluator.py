"""The engine that predicts, and computes metrics of all predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ignite.engine import Engine, Events, State

from batchopt._data import arguments
from batchopt._function.prediction import ALONE, Scored, measured, read_metrics, scored
from batchopt.ignite.events import guarded
from batchopt.optimizer import BatchOptimizer


class Predictions:
    """An iterable that predicts for all of `data`, batch by batch."""

    def __init__(self, opt: BatchOptimizer, data: Any, transform: Callable[[Any], Any] | None) -> None:
        self._opt, self._data, self._transform = opt, data, transform

    def __iter__(self) -> Iterator[Scored]:
        return scored(self._opt._function, self._data, self._transform)


class Evaluator(Engine):
    """See `create_evaluator`."""

    def __init__(self, opt: BatchOptimizer, metrics: Any, transform: Callable[[Any], Any] | None) -> None:
        super().__init__(self._process)
        self._opt, self._transform = opt, transform
        self._measures = read_metrics(metrics) if metrics else {}
        self._found: list[Scored] = []
        self.add_event_handler(Events.STARTED, Evaluator._begin)
        self.add_event_handler(Events.COMPLETED, Evaluator._compute)

    def _process(self, _: Engine, batch: Scored) -> tuple[Any, Any]:
        if self._measures:
            self._found.append(batch)
        return batch.outputs, batch.targets

    def _begin(self) -> None:
        self._found = []

    def _compute(self) -> None:
        found, self._found = self._found, []
        if self._measures:
            values = measured(self._measures, found)
            self.state.metrics.update({"metric": values} if ALONE in self._measures else values)

    def run(
        self,
        data: Any = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State:
        """Make one pass over `data`; the metrics are in `state.metrics` at `COMPLETED`."""
        if data is None or max_iters is not None or epoch_length is not None or max_epochs not in (None, 1):
            raise ValueError("an evaluator goes over its data once: give `data` alone")
        self.state.epoch_length = None  # of other data
        self.state.max_epochs = self.state.max_iters = None
        return super().run(Predictions(self._opt, data, self._transform), max_epochs=1)


def create_evaluator(
    opt: BatchOptimizer, metrics: Any = None, *, transform: Callable[[Any], Any] | None = None
) -> Engine:
    """Return an `ignite.engine.Engine` that predicts on the workers; `engine.state.output` is `(outputs, targets)` of a
    batch.

    `engine.run(data)` takes the same data as `opt.score`: a batch, a loader of batches, `Batches`, a `Dataset`. The
    module is in evaluation mode during the run; nothing of `opt` changes, and a run may come between two steps of a
    trainer. Exceptions are raised unchanged: see `guarded`.

    Args:
        metrics: as for `opt.score`; each is given all outputs and targets at once, in order, so it has the value of a
            single process. The values are in `engine.state.metrics` after the run; that of a single metric under
            `"metric"`. Metrics of ignite that you attach yourself are given batch after batch.
        transform: applied to outputs by the workers.
    """
    if not isinstance(opt, BatchOptimizer):
        raise TypeError(f"`opt` must be a BatchOptimizer; got {type(opt).__name__}")
    if transform is not None:
        arguments.check_callable("transform", transform, ("outputs",))
    return guarded(Evaluator(opt, metrics, transform))
