"""Decisions, between evaluations and by their times, how the next ones are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from batchopt._engine.compilation import Compilation
from batchopt._engine.evaluating import Evaluating
from batchopt._engine.tuning import Tuner
from batchopt.errors import WorkerError
from batchopt_workers.wire.orders import Cut


class Policies(NamedTuple):
    """The policies of an engine; None for what is not up to one."""

    tuner: Tuner | None
    compilation: Compilation | None

    @classmethod
    def of(cls, engine: Evaluating) -> Policies:
        """Return those that the settings ask for."""
        settings = engine.settings
        return cls(
            Tuner(engine) if settings.automatic or settings.sizes_chunks else None,
            Compilation(settings.compile is True) if settings.compile else None,
        )

    def before(self, engine: Evaluating) -> None:
        """Do what is due before an evaluation."""
        tuner, compilation = self
        if tuner is not None:
            tuner.before(engine)
        if compilation is not None and (compilation.insists or tuner is None or tuner.is_settled):
            compilation.before(engine)  # one thing at a time is measured

    def took(self, engine: Evaluating, seconds: float) -> None:
        """Count the time of an evaluation."""
        for policy in self:
            if policy is not None:
                policy.took(engine, seconds)

    def waited(self, seconds: float) -> None:
        """Count the time that reading the next batch took."""
        if self.tuner is not None:
            self.tuner.waited(seconds)

    def loaded(self, engine: Evaluating, size: int, seconds: float) -> None:
        """Count a batch of this size, and the time that loading it took."""
        if self.tuner is not None:
            self.tuner.loaded(engine, size, seconds)

    def size_for(self, samples: int, given: int | None) -> int | None:
        """Return the size of chunks for so many samples, the one `given` where that is not up to a policy."""
        return given if self.tuner is None else self.tuner.size_for(samples)

    def shrinks(self, engine: Evaluating, error: WorkerError, cut: Cut) -> bool:
        """After an error with this cut tell whether chunks are smaller now, so that it can be tried again."""
        return self.tuner is not None and self.tuner.shrinks(engine, error, cut)

    def freeze_workers(self, engine: Evaluating) -> None:
        """Keep the workers from now on: they may have state of the user's."""
        if self.tuner is not None:
            self.tuner.freeze_workers(engine)

    def resized(self, engine: Evaluating, automatic: bool) -> None:
        """Keep the number of workers, which the user has changed; choose again if that is to be `automatic`."""
        if self.tuner is not None:
            self.tuner.resized(engine, automatic)

    def state(self, automatic: bool) -> dict[str, Any]:
        """Return what was chosen, as plain data."""
        chosen = self.tuner.state() if self.tuner is not None and automatic else {}
        return chosen if self.compilation is None else {**chosen, "compiled": [*self.compilation.keys]}

    def resume(self, engine: Evaluating, state: Mapping[str, Any]) -> None:
        """Try what another run has chosen, which `state` says."""
        chosen = state.get("parallelize")
        if chosen is not None and self.tuner is not None and engine.settings.automatic:
            self.tuner.resume(chosen, engine.settings)

    def close(self) -> None:
        """End the processes that they have started."""
        if self.compilation is not None:
            self.compilation.close()
