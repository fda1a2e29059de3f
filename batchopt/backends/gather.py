"""Collecting what workers or nodes say: the parts that do not depend on how they say it.

A pool of processes and a set of nodes both have `pump(listener, until)`: wait until something happens, or until that
time, and tell the listener. Here a *peer* is whoever speaks: a worker process, or a node.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from batchopt.errors import WorkerError, WorkerLostError
from batchopt_workers.process.failures import message_of
from batchopt_workers.process.interrupts import let_through

PeerT = TypeVar("PeerT", bound=Hashable)
PeerIn = TypeVar("PeerIn", contravariant=True)
AskedIn = TypeVar("AskedIn", contravariant=True)
ReplyIn = TypeVar("ReplyIn", contravariant=True)


class Listener(Protocol[PeerIn, AskedIn, ReplyIn]):
    """Is told what happens."""

    def heard(self, peer: PeerIn, asked: AskedIn, reply: ReplyIn) -> None:
        """The peer said something about what it was asked."""

    def lost(self, peer: PeerIn, ending: str) -> None:
        """The peer is gone, and will not be heard again."""


class Ignore:
    """A listener that takes no notice."""

    def heard(self, peer: object, asked: object, reply: object) -> None:
        """Nothing."""

    def lost(self, peer: object, ending: str) -> None:
        """Nothing."""


class _Raised(NamedTuple):
    start: float  # of the samples that the error is about
    rank: int
    error: BaseException


class Failures:
    """Exceptions of the user's code in workers. Which of them is raised does not depend on who was heard first."""

    def __init__(self) -> None:
        self._found: list[_Raised] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, error: BaseException, rank: int, start: float = math.inf) -> None:
        """Note what was raised in a worker, about samples from `start` on."""
        self._found.append(_Raised(start, rank, error))

    def first(self) -> BaseException:
        """The exception about the first samples, of the lowest rank."""
        return min(self._found, key=lambda found: (found.start, found.rank)).error


class FunctionResults(Generic[PeerT]):
    """Collects what a function of the user returns in every worker."""

    def __init__(self) -> None:
        self.failures = Failures()
        self._waiting: set[PeerT] = set()
        self._results: dict[int, bytes] = {}
        self._ending: str | None = None

    def asked(self, peer: PeerT) -> None:
        """The peer was told to call the function."""
        self._waiting.add(peer)

    def is_awaited(self, peer: PeerT) -> bool:
        """Tell whether the peer was asked and has not answered."""
        return peer in self._waiting

    def returned(self, peer: PeerT, results: Mapping[int, bytes]) -> None:
        """The function returned, in workers of these ranks; pickled."""
        self._waiting.discard(peer)
        self._results.update(results)

    def raised(self, peer: PeerT, rank: int, error: BaseException) -> None:
        """The function raised."""
        self._waiting.discard(peer)
        self.failures.add(error, rank)

    def lost(self, peer: PeerT, ending: str) -> None:
        """The peer will not answer."""
        if peer in self._waiting:
            self._waiting.discard(peer)
            self._ending = ending

    def collect(self, pump: Callable[[float], None]) -> list[Any]:
        """Pump until all have answered: the values in rank order.

        Raises the first failure, and `WorkerLostError` if a worker is lost before it has answered.
        """
        while self._waiting:
            pump(math.inf)
            if self._ending is not None:
                raise WorkerLostError(f"a function was not run to its end: {self._ending}")
        if self.failures:
            raise self.failures.first()
        return [unpickled(rank, "the function", body) for rank, body in sorted(self._results.items())]


def unpickled(rank: int, what: str, body: bytes) -> Any:
    """Unpickle the value of the user's function in a worker. Raises `WorkerError` if it cannot be unpickled here."""
    try:
        return pickle.loads(body)
    except Exception as error:
        let_through(error)
        where = f"raised here, where what {what} returned is unpickled: return tensors, numbers and text"
        message = f"{message_of(error)} ({where})"
        raise WorkerError(rank, type(error).__name__, message, range(0)) from error
