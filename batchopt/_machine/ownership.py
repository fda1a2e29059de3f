"""Restricts an optimizer to one process and one thread at a time, without interruptions: any other use is an error, not
a race.

Calls may be nested (a step evaluates, and so does its optimizer in callbacks), but not while the inner one is running:
such a call comes from a signal handler, a finalizer or a hook, and would find a half-done state, or wait for what
cannot happen before it returns.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from batchopt.errors import BatchoptError

P = ParamSpec("P")
R = TypeVar("R")


# The public methods that run these methods.
_NAMES = {"prepare_ahead": "load", "begin": "load", "run_task_amid": "collect"}


class Owner:
    """Restricts an object to one process and one thread at a time, and protects `undisturbed` methods from other
    calls."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # of the thread that uses it
        self.user = 0  # the thread that uses it, or used it last
        self.running: tuple[str, ...] = ()  # the running undisturbed methods, the outermost first
        self.last: Callable[[], None] | None = None  # to be called when the outermost one is over
        self.doing = ""  # the operation that is half done, see `amid`

    @property
    def is_here(self) -> bool:
        """Tell whether this process made the object, and is not a fork."""
        return os.getpid() == self.pid

    def refuse(self, name: str) -> None:
        """Raise `BatchoptError`, and release the `lock`, if this thread runs an undisturbed method: any or, with a
        `name`, the method of that name."""
        if (not name or name in self.running) and self._is_at_work():
            self.lock.release()
            raise self._disturbed()

    def _is_at_work(self) -> bool:
        """Tell whether a noted method really runs: an exception out of a signal handler may have prevented the note of
        its end."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code in _guards:
                there = frame.f_locals
                if there["name"] and there.get("owner") is self and "before" in there:  # else it only asks if it may
                    return True
            frame = frame.f_back
        self.running = ()
        return False

    def _disturbed(self) -> BatchoptError:
        name = _NAMES.get(self.running[0], self.running[0])
        return BatchoptError(
            f"this BatchOptimizer is in the middle of {name}(), and cannot be used by what runs meanwhile "
            "(a signal handler, a finalizer, a hook, a loader): set a flag there, and act on it once the call has "
            "returned; only close() is possible, which ends it"
        )

    def elsewhere(self) -> BatchoptError:
        """Return the error that tells why this process or this thread cannot use the object."""
        if not self.is_here:
            return BatchoptError(
                f"this BatchOptimizer belongs to process {self.pid}; this is process {os.getpid()}, a fork of it, "
                "and has no workers: build a new one here"
            )
        name = next((thread.name for thread in threading.enumerate() if thread.ident == self.user), "of another")
        return BatchoptError(
            f"this BatchOptimizer is running in thread {name!r}: wait for it, or build one for each thread"
        )

    def end(self) -> None:
        """Run the function that waited until nothing runs."""
        if self.last is not None:
            last, self.last = self.last, None
            last()

    def amid(self, what: str) -> _Amid:
        """Return a context that marks its body as one operation: code that runs in its middle (a hook, a callback, a
        signal handler) finds it half done."""
        return _Amid(self, what)

    @property
    def is_amid(self) -> bool:
        """Tell whether something is half done."""
        return bool(self.doing)

    def check_between_steps(self, what: str) -> None:
        """Raise `BatchoptError` if the method `what` was called while something is half done."""
        if self.doing:
            raise BatchoptError(
                f"{what}() was called in the middle of {self.doing}, by a hook, a callback or a signal handler: half "
                "of the state is of before, and half of after; call it between steps (a signal handler can set a "
                "flag, to be looked at after step())"
            )

    def at_last(self, function: Callable[[], None]) -> bool:
        """Have `function` called once the running undisturbed methods are over; return False if there are none. Raise
        as `take` does in a fork and in another thread."""
        if not self.is_here or not self.lock.acquire(blocking=False):
            raise self.elsewhere()
        self.lock.release()
        waits = bool(self.running) and self._is_at_work()
        if waits:
            self.last = function
        return waits


class _Amid:
    """See `Owner.amid`."""

    def __init__(self, owner: Owner, what: str) -> None:
        self._owner, self._what = owner, what

    def __enter__(self) -> None:
        self._outer = self._owner.doing
        self._owner.doing = self._outer or self._what

    def __exit__(self, *_: object) -> None:
        self._owner.doing = self._outer


class Owned(Protocol):
    """An object with an owner."""

    _owner: Owner


T = TypeVar("T", bound=Owned)


_guards: set[CodeType] = set()  # the code of the wrappers


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Restrict a method to one thread at a time, in the process that made the object."""
    return _guarded(method, "", "")


def undisturbed(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Let no `exclusive` method be called during this method; it may call others that are `undisturbed`."""
    name = method.__name__.lstrip("_")
    return _guarded(method, name, name)


def sole(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Make a method `exclusive` and `undisturbed`."""
    return _guarded(method, "", method.__name__.lstrip("_"))


def _guarded(method: Callable[Concatenate[T, P], R], among: str, name: str) -> Callable[Concatenate[T, P], R]:
    """`among`: see `Owner.refuse`. `name`: under which the running method is noted; "" if it is not."""

    @functools.wraps(method)
    def alone(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        owner = self._owner
        if os.getpid() != owner.pid or not owner.lock.acquire(blocking=False):
            raise owner.elsewhere()
        owner.user = threading.get_ident()
        if owner.running:
            owner.refuse(among)
        before = owner.running
        try:
            if name:
                owner.running = (*before, name)
            return method(self, *args, **kwargs)
        finally:
            owner.running = before
            owner.lock.release()
            if not before and owner.last is not None:
                owner.end()

    _guards.add(alone.__code__)  # type: ignore[attr-defined]  # the wrapper's own code
    return alone  # type: ignore[return-value]  # "self" may not be passed by name
