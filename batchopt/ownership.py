"""One process and one thread at a time use an optimizer: anything else is an error, not a race."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from batchopt.errors import BatchoptError

P = ParamSpec("P")
R = TypeVar("R")


class Owner:
    """Entered by the thread that uses the object, any number of times."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._user = ""

    def __enter__(self) -> None:
        """Raises `BatchoptError` in a forked child, and while another thread is at it."""
        if os.getpid() != self._pid:
            raise BatchoptError(
                f"this BatchOptimizer belongs to process {self._pid}; this is process {os.getpid()}, a fork of it, and has "
                "no workers: build a new one here"
            )
        if not self._lock.acquire(blocking=False):
            raise BatchoptError(
                f"this BatchOptimizer is running in thread {self._user!r}: wait for it, or build one for each thread"
            )
        self._user = threading.current_thread().name

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class Owned(Protocol):
    """What has an owner."""

    _owner: Owner


T = TypeVar("T", bound=Owned)


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that runs in one thread at a time, of the process that made the object."""

    @functools.wraps(method)
    def alone(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._owner:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]  # "self" may not be passed by name
