"""The record that a member of a group sends the others: its part of an evaluation, the value of another call, or the
exception that it raised; and the records of all workers, which follow from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.answers import Answer, Partial
from batchopt.backends.base import WorkerInfo
from batchopt.backends.nodes.compression import DoesNotFit
from batchopt.errors import BatchoptError, RemoteTraceback, WorkerError
from batchopt_workers.evaluate.tree import Node
from batchopt_workers.wire.failures import Failure, describe

# Largest vector in bytes that is sent inside a result: more messages take longer than more bytes.
WHOLE = 2**17
# The state of a worker, except the number of its restarts.
STATUS = ("pid", "host", "device", "alive", "lost")
# A description of a call, by which members check that they make the same one.
Call = Mapping[str, Any]

NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


class Result(NamedTuple):
    """All that a member sends the others.

    An exception is sent as text, and as an object if its class is one of batchopt's: no object of the user is
    unpickled. `is_behind`: the member could not take what it must have.

    Its part of an evaluation: the `answers` of its workers, with spans relative to the member's start; what the user's
    code returned, and the forms of that by chunk, pickled; and its partials, whose vectors have `size` elements,
    compressed if `is_coded`. Vectors that are not short are sent after it.
    """

    failure: Failure | None = None
    error: BatchoptError | DoesNotFit | None = None
    is_behind: bool = False
    value: Any = None  # of a call that is not an evaluation
    answers: Sequence[Answer] = ()
    returned: bytes = b""
    forms: bytes = b""
    partials: Sequence[tuple[Node, Partial]] = ()
    size: int = 0
    dtype: torch.dtype = torch.float64
    is_coded: bool = False
    call: Call | None = None
    infos: Sequence[WorkerInfo] | None = None  # of its workers, if they have changed

    @classmethod
    def failed(cls, error: BaseException, is_behind: bool) -> Result:
        """Describe the exception. One of batchopt's loses its cause when it is pickled, so the text has the worker's
        traceback."""
        text = describe(error)
        if not isinstance(error, (BatchoptError, DoesNotFit)):
            return cls(text, None, is_behind)
        return cls(replace(text, traceback=getattr(error.__cause__, "text", text.traceback)), error, is_behind)

    def error_of(self, name: str, first: int) -> BaseException | None:
        """Return the exception to be raised here, if the member failed. `name`: the member; `first`: the rank of its
        first worker."""
        if self.failure is None:
            return None
        error: BaseException | None = self.error
        if error is None:
            error = WorkerError(first, self.failure.type_name, self.failure.message, range(0), f"on {name}")
        elif isinstance(error, WorkerError):  # its rank is that on the member
            _, (rank, *others) = error.__reduce__()
            error = WorkerError(first + rank, *others)
        if self.failure.traceback:
            error.__cause__ = RemoteTraceback(self.failure.traceback)
        return error

    @property
    def is_short(self) -> bool:
        """Tell whether the vectors are sent inside this record."""
        return self.size * self.dtype.itemsize <= WHOLE

    @property
    def bare(self) -> Result:
        """The same without vectors."""
        return self._replace(partials=[(node, partial._replace(gradient=NOTHING)) for node, partial in self.partials])

    def memory(self) -> list[torch.Tensor]:
        """Return memory for the vectors that are sent after this record."""
        count = 0 if self.is_short else len(self.partials)
        return [torch.empty(self.size, dtype=self.dtype, device="cpu") for _ in range(count)]


class Infos:
    """The records of all workers, by rank."""

    def __init__(self) -> None:
        self._all: dict[int, WorkerInfo] = {}
        self._restarts: dict[int, int] = {}  # of each worker, as counted by its node

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter([self._all[rank] for rank in sorted(self._all)])

    def of(self, ranks: range) -> list[WorkerInfo]:
        """Return the records of these ranks."""
        return [self._all[rank] for rank in ranks if rank in self._all]

    def expect(self, workers: int) -> None:
        """Have records of `workers` workers: new ones, where there are none."""
        self._restarts = {rank: number for rank, number in self._restarts.items() if rank < workers}
        self._all = {
            rank: self._all.get(rank) or WorkerInfo(rank, 0, "", torch.device("cpu"), alive=False)
            for rank in range(workers)
        }

    def moved(self, ranks: range) -> None:
        """Note that these workers are on other nodes, which count their restarts from 0 on."""
        self._restarts |= dict.fromkeys(ranks, 0)
        for info in self.of(ranks):
            info.restarts += 1
            info.lost = False

    def learn(self, infos: Sequence[WorkerInfo]) -> None:
        """Take over a member's records of its workers; what is counted here stays."""
        for info in infos:
            known = self._all.get(info.rank)
            if known is None:  # it is about to end
                continue
            known.restarts += info.restarts - self._restarts.get(info.rank, 0)
            self._restarts[info.rank] = info.restarts
            for name in STATUS:
                setattr(known, name, getattr(info, name))


def status(info: WorkerInfo) -> Any:
    """Return the state of a worker, for comparison."""
    return info.restarts, *(getattr(info, name) for name in STATUS)
