"""The observers of a function, including a timeline while one is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from batchopt._function.observer import Evaluated, Observer, Trials
from batchopt._function.timeline import Timeline
from batchopt._mapreduce.answers import Answer

_NOTHING: AbstractContextManager[None] = nullcontext()


class Observers:
    """Passes each event on to all observers; while the workers are busy, the latest observer comes first."""

    def __init__(self, first: Sequence[Observer]) -> None:
        self._all = list(first)
        self._timeline: Timeline | None = None
        self.trials: Trials | None = None  # of the current step
        self._sort()

    def _sort(self) -> None:
        """Find the observers of each event: only those that override it."""
        self._begins = [o.begins for o in self._all if type(o).begins is not Observer.begins]
        self._busy = [o.busy for o in reversed(self._all) if type(o).busy is not Observer.busy]
        self.look = any([observer.looks for observer in self._all])  # an observer uses the workers' answers

    @contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        """Let `observer` follow the evaluations in the body too."""
        self._all.append(observer)
        try:
            self._sort()
            yield
        finally:
            self._all.remove(observer)
            self._sort()

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record the body in a new timeline."""
        self._timeline = timeline = Timeline()
        try:
            with self.including(timeline):
                yield timeline
        finally:
            timeline.close()
            self._timeline = None

    @property
    def follow(self) -> bool:
        """Tell whether any observer follows evaluations."""
        return bool(self._all) or self.trials is not None

    def doing(self, name: str) -> AbstractContextManager[None]:
        """Record the body as an event of the timeline, if there is one."""
        return _NOTHING if self._timeline is None else self._timeline.doing(name)

    def begins(self) -> None:
        """Pass on the beginning of an evaluation."""
        if self.trials is not None:
            self.trials.begins()
        for begins in self._begins:
            begins()

    def busy(self) -> None:
        """Pass on that the workers compute."""
        if self.trials is not None:
            self.trials.busy()
        for busy in self._busy:
            busy()

    def evaluated(self, found: Evaluated) -> None:
        """Pass on the end of an evaluation."""
        for observer in self._all:
            observer.evaluated(found)
        if self.trials is not None:
            self.trials.evaluated(found)

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Pass on a finished task of that name on a batch that is cut at `bounds`."""
        for observer in self._all:
            observer.worked(name, answers, bounds)
