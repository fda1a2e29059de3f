"""The records that members exchange in an evaluation, what follows from them, and what their compression leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.answers import Span
from batchopt._mapreduce.compression import Compression, DoesNotFit, compress
from batchopt.backends.base import WorkerInfo
from batchopt.backends.nodes.fixed_order import WHOLE
from batchopt.errors import BatchoptError, RemoteTraceback, WorkerError
from batchopt_workers.map.tree import Node
from batchopt_workers.map.watch import StateWritten
from batchopt_workers.process.failures import Failure, describe


class NodeFailure(NamedTuple):
    """An exception on a node: as text, and as an object if its class is one of batchopt's. No user object is
    unpickled."""

    text: Failure
    error: BatchoptError | StateWritten | DoesNotFit | None

    @classmethod
    def of(cls, error: BaseException) -> NodeFailure:
        """Describe the exception. One of batchopt's loses its cause when it is pickled, so the text has the worker's
        traceback."""
        text = describe(error)
        if not isinstance(error, (BatchoptError, StateWritten, DoesNotFit)):
            return cls(text, None)
        return cls(replace(text, traceback=getattr(error.__cause__, "text", text.traceback)), error)

    def error_of(self, name: str, first: int) -> BaseException:
        """Return the exception to be raised here. `name`: the node; `first`: the rank of its first worker."""
        error: BaseException | None = self.error
        if error is None:
            error = WorkerError(first, self.text.type_name, self.text.message, range(0), f"on {name}")
        elif isinstance(error, WorkerError):  # its rank is that on the node
            _, (rank, *others) = error.__reduce__()
            error = WorkerError(first + rank, *others)
        if self.text.traceback:
            error.__cause__ = RemoteTraceback(self.text.traceback)
        return error


# The state of a worker, except the number of its restarts.
STATUS = ("pid", "host", "device", "alive", "lost")
# A description of a call, by which members check that they make the same one.
Call = Mapping[str, Any]


class Work(NamedTuple):
    """The work of one worker: an `Answer` with spans relative to the member's start, and pickled results."""

    rank: int
    samples: int
    seconds: float
    spans: list[Span]
    results: bytes
    drew: bool


class Summed(NamedTuple):
    """A partial without its vector: its place in the tree, and the other fields of `Partial`."""

    node: Node
    losses: tuple[float, ...]
    used: bytes
    changes: bytes


class Contribution(NamedTuple):
    """A member's part of an evaluation. `partials` have vectors of `size` elements, compressed if `is_coded`; `vectors`
    has the elements of short ones. `forms` of results are pickled, by chunk; `infos` of its workers are sent if they
    have changed."""

    call: Call
    failure: NodeFailure | None = None
    work: Sequence[Work] = ()
    partials: Sequence[Summed] = ()
    size: int = 0
    dtype: torch.dtype = torch.float64
    forms: bytes = b""
    infos: Sequence[WorkerInfo] | None = None
    is_coded: bool = False
    vectors: bytes = b""
    value: Any = None  # the result of a call that is not an evaluation
    is_behind: bool = False  # it could not take over earlier updates

    @property
    def is_short(self) -> bool:
        """Tell whether the vectors are sent inside this record."""
        return self.size * self.dtype.itemsize <= WHOLE

    def read(self) -> list[torch.Tensor]:
        """Return the short vectors."""
        whole = torch.frombuffer(bytearray(self.vectors), dtype=self.dtype)
        return [*whole.view(len(self.partials), self.size)] if self.partials else []


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

    def expect(self, ranks: range) -> None:
        """Add records of new workers."""
        for rank in ranks:
            self._all.setdefault(rank, WorkerInfo(rank, 0, "", torch.device("cpu"), alive=False))

    def cut(self, workers: int) -> None:
        """Keep the records of the first `workers`."""
        self._all = {rank: info for rank, info in self._all.items() if rank < workers}
        self._restarts = {rank: number for rank, number in self._restarts.items() if rank < workers}

    def moved(self, ranks: range) -> None:
        """Note that these workers are on other nodes, which count their restarts from 0 on."""
        self._restarts |= dict.fromkeys(ranks, 0)

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


def differences(calls: Sequence[Call], names: Sequence[str]) -> str:
    """Describe in what the calls differ, and whose; empty if they do not."""
    if all(call == calls[0] for call in calls):
        return ""
    texts = []
    for key in dict.fromkeys(key for call in calls for key in call):
        values = [call.get(key) for call in calls]
        if any(value != values[0] for value in values):
            by_value: dict[str, list[str]] = {}
            for name, value in zip(names, values, strict=True):
                by_value.setdefault(str(value), []).append(name)
            texts.append(f"{key} " + ", ".join(f"{value} on {' and '.join(of)}" for value, of in by_value.items()))
            if key == "call":
                break  # later differences follow from this one
    return "; ".join(texts)


class Round(NamedTuple):
    """An evaluation with compressed gradients, by its number: it adds the residuals of evaluation `taken` (0: none),
    and the next one may continue from this one, from `taken` or from `kept`."""

    evaluation: int
    taken: int
    kept: int


class GradientResiduals:
    """The remainders of compressing this member's gradients, to be added to its next ones, by the number of the
    evaluation that left them; gradients have `size` elements.

    Compression with error feedback: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent and
    its application to data-parallel distributed training of speech DNNs", Interspeech 2014.
    """

    def __init__(self, compression: Compression, size: int, dtype: torch.dtype) -> None:
        self._compression, self._size, self._dtype = compression, size, dtype
        self._left: dict[int, torch.Tensor] = {}

    def encode(self, gradient: torch.Tensor, members: int, of: Round) -> torch.Tensor | None:
        """Encode this member's gradient, one of `members`; return None if it is not finite, since it must then be sent
        uncompressed. Raises `DoesNotFit`."""
        self._left = {number: self._left[number] for number in (of.taken, of.kept) if number in self._left}
        found = compress(self._compression, gradient, self._left.get(of.taken), members)
        if found is not None and found.residual is not None:
            self._left[of.evaluation] = found.residual
        return None if found is None else found.code

    def decode(self, code: torch.Tensor, members: int) -> torch.Tensor:
        """Decode the gradient of one of `members` members."""
        return self._compression.decode(code, members, self._size, self._dtype)

    def pass_by(self, of: Round) -> None:
        """Keep this member's residual in an evaluation in which it has no share."""
        if of.taken in self._left:
            self._left[of.evaluation] = self._left[of.taken]

    def after(self, evaluation: int) -> torch.Tensor | None:
        """Return the residual of an evaluation; None if there is none."""
        return self._left.get(evaluation)

    def restore(self, evaluation: int, of_all: Mapping[int, torch.Tensor], place: int, size: int) -> None:
        """Take over the saved residuals of all members, as the one at `place` of `size`: its own or, if the number of
        members has changed, an equal part of the sum."""
        if not of_all:
            return
        if len(of_all) <= size and max(of_all) < size:
            mine = of_all.get(place)
        else:
            mine = torch.stack([*of_all.values()]).sum(0) / size
        if mine is not None:
            self._left[evaluation] = mine.clone()
