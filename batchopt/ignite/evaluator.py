"""The engine that predicts, and computes metrics of all predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from ignite.engine import Engine, Events, State

from batchopt.extending import Scored, Scoring, check_callable, scored
from batchopt.ignite.events import guarded
from batchopt.optimizer import BatchOptimizer


class Evaluator(Engine):
    """See `create_evaluator`."""

    def __init__(self, opt: BatchOptimizer, metrics: Any, transform: Callable[[Any], Any] | None) -> None:
        super().__init__(self._process)
        self._scored: Callable[[Any], Scoring] = partial(scored, opt, metrics=metrics, transform=transform)
        self._scored(None)  # raises for what are no metrics
        self._is_named = metrics is None or isinstance(metrics, Mapping)
        self.add_event_handler(Events.COMPLETED, Evaluator._compute)

    def _process(self, _: Engine, batch: Scored) -> tuple[Any, Any]:
        return batch.outputs, batch.targets

    def _compute(self) -> None:
        values = cast(Scoring, self.state.dataloader).values
        self.state.metrics.update(values if self._is_named else {"metric": values})

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
        return super().run(self._scored(data), max_epochs=1)


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
        check_callable("transform", transform, ("outputs",))
    return guarded(Evaluator(opt, metrics, transform))
