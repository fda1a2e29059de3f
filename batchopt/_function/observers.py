"""The observers of a function, among them a timeline while one is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from batchopt._function.observer import Evaluated, Observer
from batchopt._function.timeline import Timeline
from batchopt._mapreduce.answers import Answer


class Observers:
    """Passes each event on to all observers; while the workers are busy, the youngest observer comes first."""

    def __init__(self, first: Sequence[Observer]) -> None:
        self._all = list(first)
        self._timeline: Timeline | None = None

    @contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        """`observer` follows the evaluations in the body, too."""
        self._all.append(observer)
        try:
            yield
        finally:
            self._all.remove(observer)

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

    def doing(self, name: str) -> AbstractContextManager[None]:
        """Record the body as an event of the timeline, if there is one."""
        return nullcontext() if self._timeline is None else self._timeline.doing(name)

    def begins(self) -> None:
        """An evaluation begins."""
        for observer in self._all:
            observer.begins()

    def busy(self) -> None:
        """The workers compute."""
        for observer in reversed(self._all):
            observer.busy()

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation is over."""
        for observer in self._all:
            observer.evaluated(found)

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Workers have done a task of that name on a batch that was cut at `bounds`."""
        for observer in self._all:
            observer.worked(name, answers, bounds)
