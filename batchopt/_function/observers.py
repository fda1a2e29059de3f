"""The observers of an engine, by what they follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from batchopt._data.prefetch import Ahead
from batchopt._function.observer import Evaluated, Observer, Trials
from batchopt._function.reporter import Reporter
from batchopt._machine.cores import torch_threads
from batchopt._mapreduce.answers import Answer

Followed = TypeVar("Followed", bound=Observer)


OF_STEPS = ("step_begins", "accepted", "step_ended")


class Observers:
    """Passes each event on to all observers; while the workers are busy, the latest observer comes first."""

    def __init__(self, verbose: int) -> None:
        self.reporter = Reporter(verbose)
        self._all: list[Observer] = [self.reporter] if verbose else []
        self.trials: Trials | None = None  # of the current step
        self._sort()

    def _sort(self) -> None:
        """Find the observers of each event: only those that override it."""
        self.of_beginnings = [o.begins for o in self._all if type(o).begins is not Observer.begins]
        self._busy = [o.busy for o in reversed(self._all) if type(o).busy is not Observer.busy]
        self.of_evaluations, self.of_work = bool(self._all), [o for o in self._all if type(o).did is not Observer.did]
        self.of_steps = [o for o in self._all if any(getattr(type(o), e) is not getattr(Observer, e) for e in OF_STEPS)]
        self.look = any([observer.looks for observer in self._all])  # an observer uses the workers' answers

    def add(self, observer: Observer) -> None:
        """Let `observer` follow all evaluations from now on."""
        self._all.append(observer)
        self._sort()

    @contextmanager
    def including(self, observer: Followed) -> Iterator[Followed]:
        """Let `observer` follow the evaluations in the body too."""
        self._all.append(observer)
        try:
            self._sort()
            yield observer
        finally:
            self._all.remove(observer)
            self._sort()

    def report(self, verbose: int) -> None:
        """Report so much from now on."""
        self._all = [observer for observer in self._all if observer is not self.reporter]
        self.reporter.become(verbose)
        self._all = [self.reporter] * bool(verbose) + self._all
        self._sort()

    def close(self) -> None:
        """Finish the reports."""
        self.reporter.close()

    def did(self, name: str, began: float) -> None:
        """Pass on a finished piece of work in this process."""
        for observer in self.of_work:
            observer.did(name, began)

    def begins(self) -> None:
        """Pass on the beginning of an evaluation."""
        for begins in self.of_beginnings:
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

    def decided(self, message: str, *arguments: object) -> None:
        """Pass on what was decided about evaluations."""
        for observer in self._all:
            observer.decided(message % arguments)

    def worked(self, name: str, answers: Sequence[Answer], bounds: Sequence[int]) -> None:
        """Pass on a finished task of that name on a batch that is cut at `bounds`."""
        for observer in self._all:
            observer.worked(name, answers, bounds)


class ReadsAhead(Observer):
    """Fetches the next batch while the workers compute."""

    def __init__(self, ahead: Ahead[Any]) -> None:
        self._ahead = ahead

    def busy(self) -> None:
        with torch_threads(1):  # the workers have the cores
            self._ahead.fetch()
