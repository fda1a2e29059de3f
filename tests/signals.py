"""A signal, or an interrupt, at a chosen place of the library's code."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stop(Exception):
    """A signal handler raises it."""


def stop() -> None:
    raise Stop


class SignalAt:
    """Sends this process a signal when the `number`-th function of ours is called, where Python calls handlers, too;
    not in generators, of which Python drops what is raised while they end."""

    def __init__(self, number: int, within: str = "batchopt") -> None:
        self.number, self.within, self.calls = number, within, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        ours = frame.f_globals.get("__name__", "").startswith(self.within)
        if ours and event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self.calls += 1
            if self.calls == self.number:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

    def amid(self, work: Callable[[], object]) -> None:
        """Do this work."""
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)
