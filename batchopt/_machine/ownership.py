"""One process and one thread at a time use an optimizer, and nothing that interrupts it: anything else is an error, not
a race.

Calls may be nested (a step evaluates, and so does what its optimizer calls back), but not while the inner one is at
work: what comes then comes from a signal handler, a finalizer or a hook, and would find things half done, or wait for
what cannot happen before it returns.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from batchopt.errors import BatchoptError

P = ParamSpec("P")
R = TypeVar("R")


# What users call that runs these methods.
_NAMES = {"prepare": "load", "begin": "load", "measure": "calibrate", "carry_out": "collect"}


class Owner:
    """Entered by the thread that uses the object, any number of times, but not while an `undisturbed` method runs."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._user = ""
        self._running: tuple[str, ...] = ()  # the methods that may not be disturbed now, the outermost first
        self._last: Callable[[], None] | None = None  # to be called when that one is over
        self._amid = ""  # what is being done as a whole

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that made the object, and no fork of it."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        """Raises `BatchoptError` in a forked child, while another thread is at it, and while this one is at work."""
        self._take()
        if self._running and self._is_at_work():
            self._lock.release()
            raise self._disturbed()

    def _is_at_work(self) -> bool:
        """Whether a method runs, as it was written down: an exception out of a signal handler may have come before its
        end was."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code in _undisturbed and frame.f_locals.get("owner") is self:
                return True
            frame = frame.f_back
        self._running = ()
        return False

    def _disturbed(self) -> BatchoptError:
        name = _NAMES.get(self._running[0], self._running[0])
        return BatchoptError(
            f"this BatchOptimizer is in the middle of {name}(), and cannot be used by what runs meanwhile "
            "(a signal handler, a finalizer, a hook, a loader): set a flag there, and act on it once the call has "
            "returned; only close() is possible, which ends it"
        )

    def _take(self) -> None:
        if not self.is_here:
            raise BatchoptError(
                f"this BatchOptimizer belongs to process {self._pid}; this is process {os.getpid()}, a fork of it, "
                "and has no workers: build a new one here"
            )
        if not self._lock.acquire(blocking=False):
            raise BatchoptError(
                f"this BatchOptimizer is running in thread {self._user!r}: wait for it, or build one for each thread"
            )
        self._user = threading.current_thread().name

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def begin(self, name: str) -> tuple[str, ...]:
        """The method of that name runs, until `end` is given what this returns. Raises as `__enter__` does, but if only
        others run."""
        self._take()
        if name in self._running and self._is_at_work():
            self._lock.release()
            raise self._disturbed()
        before = self._running
        self._running = (*before, name)
        return before

    def end(self, before: tuple[str, ...]) -> None:
        """The method that ran is over."""
        self._running = before
        self._lock.release()
        if not before and self._last is not None:
            last, self._last = self._last, None
            last()

    @contextmanager
    def amid(self, what: str) -> Iterator[None]:
        """Mark the body as one operation: whatever enters in its middle (a hook, a callback, a signal handler) finds
        half of it done."""
        outer, self._amid = self._amid, self._amid or what
        try:
            yield
        finally:
            self._amid = outer

    @property
    def is_amid(self) -> bool:
        """Whether something is half done."""
        return bool(self._amid)

    def check_between_steps(self, what: str) -> None:
        """Raise `BatchoptError` if the method `what` was called while something is half done."""
        if self._amid:
            raise BatchoptError(
                f"{what}() was called in the middle of {self._amid}, by a hook, a callback or a signal handler: half "
                "of the state is of before, and half of after; call it between steps (a signal handler can set a "
                "flag, to be looked at after step())"
            )

    def at_last(self, function: Callable[[], None]) -> bool:
        """Have `function` called once what may not be disturbed is over; False if there is no such thing now. Raises as
        `__enter__` does in a fork and in another thread."""
        self._take()
        try:
            waits = bool(self._running) and self._is_at_work()
            if waits:
                self._last = function
            return waits
        finally:
            self._lock.release()


class Owned(Protocol):
    """An object with an owner."""

    _owner: Owner


T = TypeVar("T", bound=Owned)


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that runs in one thread at a time, of the process that made the object."""

    @functools.wraps(method)
    def alone(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._owner:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]  # "self" may not be passed by name


_undisturbed: set[CodeType] = set()  # what methods of that kind run in


def undisturbed(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method during which no `exclusive` one can be called; it may call others that are `undisturbed`."""

    name = method.__name__.lstrip("_")

    @functools.wraps(method)
    def alone(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        owner = self._owner
        before = owner.begin(name)
        try:
            return method(self, *args, **kwargs)
        finally:
            owner.end(before)

    _undisturbed.add(alone.__code__)  # type: ignore[attr-defined]  # that of the function that was wrapped
    return alone  # type: ignore[return-value]  # "self" may not be passed by name
