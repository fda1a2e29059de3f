"""The observers of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from batchopt._engine.observer import Observer
from batchopt._engine.reporter import Reporter

Followed = TypeVar("Followed", bound=Observer)


class Observers(list[Observer]):
    """All that follow an engine, in the order in which they are told; the `reporter` is one if it reports anything."""

    def __init__(self, verbose: int) -> None:
        self.reporter = Reporter(verbose)
        super().__init__([self.reporter] if verbose else [])

    def report(self, verbose: int) -> None:
        """Report so much from now on, before other observers are told."""
        others = [observer for observer in self if observer is not self.reporter]
        self.reporter.become(verbose)
        self[:] = [self.reporter, *others] if verbose else others

    @contextmanager
    def including(self, observer: Followed) -> Iterator[Followed]:
        """Let `observer` follow the evaluations in the body too."""
        self.append(observer)
        try:
            yield observer
        finally:
            del self[max(i for i, one in enumerate(self) if one is observer)]  # another one may be equal

    def busy(self) -> None:
        """Tell all that the workers compute, the latest first."""
        for observer in reversed(self):
            observer.busy()

    def did(self, name: str, began: float) -> None:
        """Tell all of a finished piece of work in this process."""
        for observer in self:
            observer.did(name, began)

    def decided(self, message: str, *arguments: object) -> None:
        """Tell all what was decided about evaluations."""
        for observer in self:
            observer.decided(message % arguments)
