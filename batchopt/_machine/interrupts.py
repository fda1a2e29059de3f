"""Ctrl-C that waits until something is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Held:
    """Holds back Ctrl-C from `begin` to `end`, where a handler of Python's would hear of it."""

    def __init__(self) -> None:
        self.heard = self.holds = False
        self._before: Any = None

    def begin(self) -> None:
        """Hold it back from now on."""
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._before, self.holds = handler, True
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def end(self) -> None:
        """Hold it back no longer."""
        if self.holds:
            signal.signal(signal.SIGINT, self._before)
            self.holds = False

    def let_through(self) -> None:
        """End, and have what was heard handled now."""
        self.end()
        if self.heard:
            self.heard = False
            signal.raise_signal(signal.SIGINT)
