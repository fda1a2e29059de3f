"""The engine whose process function is a step, and its data, which is read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ignite.engine import Engine, Events, State

from batchopt.extending import Batches, PreparedBatch, check_callable, prepared
from batchopt.ignite.events import COUNTS, StepEvents, guarded, telling
from batchopt.optimizer import BatchOptimizer


class Trainer(Engine):
    """See `create_trainer`."""

    def __init__(self, opt: BatchOptimizer, prepare: Prepare | None, transform: Callable[[float], Any] | None) -> None:
        super().__init__(self._process)
        self.opt, self._prepare, self._transform = opt, prepare, transform
        self.time_left: Callable[[], float] | None = None  # the seconds after which a step is to end
        self.register_events(*StepEvents, event_to_attr=COUNTS)
        self.add_event_handler(Events.EPOCH_STARTED, Trainer._begin_pass)

    def _process(self, _: Engine, batch: Any) -> Any:
        with telling(self, self.opt):
            if not isinstance(batch, PreparedBatch):  # of data that a handler has set
                batch = next(iter(prepared(self.opt, [batch])))
            loss = self.opt.step(batch, time_limit=None if self.time_left is None else self.time_left())
        if self.opt.stopped:
            self.terminate()
            self.state.iteration -= self.opt.paused  # its batch does not count: a run that resumes makes the rest
        return loss if self._transform is None else self._transform(loss)

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State:
        """Run like any engine. `Batches` continue from their position, by which epochs and iterations are counted."""
        feed = None if data is None else Feed(self.opt, data, self._prepare)
        if feed is not None and feed.batches is not None and self._internal_run_generator is None:
            if self._follow(feed, max_epochs, max_iters):
                return self.state
            max_epochs, max_iters = self.state.max_epochs, self.state.max_iters
        try:
            return super().run(feed, max_epochs, max_iters, epoch_length)
        finally:
            present = self.state.dataloader
            if isinstance(present, Feed) and self._internal_run_generator is None:  # otherwise it was interrupted
                present.close()

    def _follow(self, feed: Feed, max_epochs: int | None, max_iters: int | None) -> bool:
        """Count from the position of the feed's `Batches`; return whether nothing remains to be done."""
        assert feed.batches is not None
        state, position = self.state, feed.batches.state_dict()
        length = state.epoch_length = length_of(feed)
        epoch, index = position["epoch"], position["index"]
        state.epoch, state.iteration = epoch, position["iteration"] if length is None else epoch * length + index
        if max_iters is None:
            state.max_epochs, state.max_iters = max_epochs or state.max_epochs or epoch + 1, None
            over = epoch >= state.max_epochs
        else:
            state.max_epochs, state.max_iters = None, max_iters
            over = state.iteration >= max_iters
        self.should_terminate, self._init_iter = False, index
        return over

    def _begin_pass(self) -> None:
        """Notify an optimizer that takes snapshots, such as SVRG, of a new pass, except when an epoch resumes."""
        begin, feed, state = getattr(self.opt.optimizer, "begin_pass", None), self.state.dataloader, self.state
        if begin is None or not isinstance(feed, Feed):
            return
        if feed.batches is not None:
            begun = feed.batches.state_dict()["index"] > 0
        else:
            begun = bool(state.epoch_length and state.iteration % state.epoch_length)
        if not begun:
            begin(lambda: self.opt.full_gradient(feed.data, convert=feed.prepare))


def length_of(feed: Any) -> int | None:
    """Return the number of batches in an epoch; None if unknown."""
    try:
        return len(feed)
    except TypeError:
        return None


def create_trainer(
    opt: BatchOptimizer,
    *,
    prepare_batch: Callable[[Any], Any] | None = None,
    output_transform: Callable[[float], Any] | None = None,
) -> Trainer:
    """Return an `ignite.engine.Engine` that steps with `opt` on each batch; `engine.state.output` is the loss, as
    `opt.step` returns it.

    `engine.run(data, max_epochs=20)` takes the same data as `opt.steps`: `Batches`, a `DataLoader`, a list of batches.
    The next batch is read and placed while the workers compute. `Batches` have a position: a run continues exactly from
    there, also in the middle of an epoch, and their epochs are counted, so that nothing remains to be done if they are
    past `max_epochs`.

    Args:
        prepare_batch: converts what the data yields to an argument of `opt.step`, such as `(inputs, targets)`.
        output_transform: converts the loss to `engine.state.output`.

    It has the events of `StepEvents`, in addition to ignite's own. An optimizer with `begin_pass` (`SVRG`) is notified
    at the start of each epoch, with `opt.full_gradient` of the data, except when an epoch resumes. Exceptions are
    raised unchanged, after all their handlers were called: see `guarded`. A step that failed is undone, and does not
    advance `Batches`: so `run` may be called again.
    """
    if not isinstance(opt, BatchOptimizer):
        raise TypeError(f"`opt` must be a BatchOptimizer; got {type(opt).__name__}")
    if prepare_batch is not None:
        check_callable("prepare_batch", prepare_batch, ("batch",))
    if output_transform is not None:
        check_callable("output_transform", output_transform, ("loss",))
    return guarded(Trainer(opt, prepare_batch, output_transform))


# Converts what a loader yields to an argument of `opt.step`.
Prepare = Callable[[Any], Any]


class Feed:
    """An iterable over `prepared(opt, data)`; with `Batches`, over the remaining epoch."""

    def __init__(self, opt: BatchOptimizer, data: Iterable[Any], prepare: Prepare | None) -> None:
        self._opt = opt
        self.batches = data if isinstance(data, Batches) else None
        self.data, self.prepare = data, prepare
        self._present: Iterator[PreparedBatch] | None = None

    def __iter__(self) -> Iterator[PreparedBatch]:
        self.close()
        self._present = prepared(self._opt, self.data, convert=self.prepare)
        return self._present

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raise `TypeError` if unknown."""
        return len(self.data)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the current iteration, and reading ahead with it."""
        present, self._present = self._present, None
        if present is not None:
            present.close()  # type: ignore[attr-defined]  # it is a generator
