"""All observers of a function, and the timeline among them while one is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from batchopt._function.observer import Evaluated, Observer
from batchopt._function.timeline import Timeline


class Observers:
    """Tells each observer; those that came last have their turn first while the workers are busy."""

    def __init__(self, first: Sequence[Observer]) -> None:
        self._all = list(first)
        self._timeline: Timeline | None = None

    @contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        """`observer` is told of what happens inside, too."""
        self._all.append(observer)
        try:
            yield
        finally:
            self._all.remove(observer)

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """A timeline of what happens inside."""
        self._timeline = timeline = Timeline()
        try:
            with self.including(timeline):
                yield timeline
        finally:
            timeline.close()
            self._timeline = None

    def doing(self, name: str) -> AbstractContextManager[None]:
        """What is inside, as an event of the timeline."""
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
