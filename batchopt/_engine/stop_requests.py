"""Requests to end a step early: by a call, a signal, or a time limit."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from batchopt.errors import BatchoptError

# Returns what all ranks find, given what this one does: the first request, or None.
Agree = Callable[[str | None], str | None]


class StopRequests:
    """Requests to end a step at its next accepted point.

    A signal handler, a callback and another thread may only assign here, so whatever runs meanwhile is not disturbed. A
    signal stands until the end: all further steps end at once. A call stands until the end of the step that it ends.
    Ranks ask each other at each point; so that this costs nothing where nobody will ask, `signals` or a time limit
    must be known.
    """

    def __init__(self, signals: Sequence[signal.Signals], agree: Agree | None) -> None:
        """Handle `signals` from now on. `agree`: None without other ranks. Raises `ValueError` away from the main
        thread, where Python handles no signals."""
        self.why: str | None = None  # the last step ended early, or is the last one of its loop
        self._asked: str | None = None
        self._signal: str | None = None
        self._deadline, self._limit = math.inf, ""
        self._agree = agree
        self._before: dict[signal.Signals, Any] = {}
        self._closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            raise ValueError("`stop_on`: signals are handled in the main thread only: make the optimizer there")
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before, again = self._before[signal.Signals(number)], self._signal is not None
        if self._closed and signal.getsignal(number) == self._note:  # in another thread, which cannot put handlers back
            self._restore()
            signal.raise_signal(number)
            return
        self._signal = signal.Signals(number).name
        if callable(before) and (again or before is not signal.default_int_handler):  # Ctrl-C twice ends at once
            before(number, frame)

    @property
    def _is_armed(self) -> bool:
        return bool(self._before) or self._deadline < math.inf

    def ask(self) -> None:
        """Have the step end that is going on, or else the next one. Raises `BatchoptError` where other ranks do not
        look."""
        if self._agree is not None and not self._is_armed:
            raise BatchoptError(
                "stop() on ranks: so that all of them stop after the same iteration they have to ask each other, which "
                "they do with stop_on=... or time_limit=... only: give one of them on all ranks"
            )
        self._asked = "stop()"

    def begin(self, time_limit: float | None) -> None:
        """Begin a step of at most so many seconds."""
        self.why = None
        if time_limit is not None:
            self._deadline, self._limit = time.monotonic() + time_limit, f"time_limit of {time_limit:g} s"

    @property
    def is_late(self) -> bool:
        """Tell whether the time is over."""
        return time.monotonic() > self._deadline

    def is_due(self, has_moved: bool = True) -> bool:
        """Tell whether the step is to end here; of ranks all or none. The clock ends no step before it `has_moved` to
        an accepted point: then a loop of steps that are too short would never end."""
        if self.why is None:
            late = self._limit if has_moved and time.monotonic() > self._deadline else None
            found = self._signal or self._asked or late
            self.why = self._agree(found) if self._agree is not None and self._is_armed else found
        return self.why is not None

    def end(self) -> None:
        """End the step. A request that came after its last point counts, too."""
        try:
            self.is_due()
        finally:
            self._asked, self._deadline = None, math.inf

    def abandon(self) -> None:
        """Forget a step that an exception has ended."""
        self.why, self._asked, self._deadline = None, None, math.inf

    def close(self) -> None:
        """Put the former handlers back, where nobody has set others since; from another thread than the main one, when
        the next signal comes."""
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note and before is not None:
                signal.signal(number, self._former(number))

    def _former(self, number: signal.Signals) -> Any:
        """Return the handler that was there before, and is not one of an object like this that was closed since."""
        before = self._before[number]
        owner = getattr(before, "__self__", None)
        return owner._former(number) if isinstance(owner, StopRequests) and owner._closed else before
