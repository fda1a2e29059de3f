"""A piece of work that leaves everything as it was if it fails."""

from __future__ import annotations

import time

from batchopt._engine.evaluating import Evaluating


class Undo:
    """Keeps the past and the step of an engine, and puts both back if the body raises, with the buffers of a step
    that the body has begun or evaluated. A batch has to be loaded again if the body has loaded another one."""

    def __init__(self, engine: Evaluating, name: str) -> None:
        """Observers are told that `name` was done."""
        self._engine, self._name, self._began = engine, name, time.perf_counter()
        past, self._step, self._outer = engine.past, engine.step, engine.begun
        self.past = past if past.outputs is None else past._replace(outputs=None)  # they may be large
        self._is_undone = False

    def __enter__(self) -> None:
        self._engine.begun = self._outer or self.past

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        engine = self._engine
        try:
            if kind is not None:
                self.back()
        finally:
            engine.begun = self._outer
            engine.observers.did(self._name, self._began)

    def back(self) -> None:
        """Put everything back; a second call does nothing."""
        if self._is_undone:
            return
        engine, before = self._engine, self._step
        engine.past, step = self.past, engine.step
        had_ended = before is not None and before.ended  # then its results stay
        is_other = step is not None and (before is None or step.number != before.number or not had_ended)
        if is_other and not engine.subject.buffers.is_written:
            engine.subject.buffers.undo()
        engine.step = before if before is not None and step is not None and step.batch is before.batch else None
        self._is_undone = True
