"""What is said between the parent and the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.compression import Compression
from batchopt.backends.ledger import ChunkRun
from batchopt.backends.ray.transfer import Bytes
from batchopt.errors import BatchoptError
from batchopt_workers.failures import Failure, describe
from batchopt_workers.layout import Layout
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.watch import StateWritten


class NodeTask(Enum):
    """What a node was asked to do, and how error messages say it."""

    HANDSHAKE = "starting"
    START = "receiving the module"
    EVALUATE = "evaluating"
    PROBE = "being measured"
    RUN = "running a function"
    RESIZE = "being resized"
    CLOSE = "ending"


class Question(Enum):
    """What a node is asked about an assignment while it evaluates it."""

    RELEASE = "give up half of what no worker has begun"
    CALL_OFF = "stop: nobody waits for this assignment"
    PING = "give a sign"
    RESIDUALS = "say what compression has left of gradients"


class Undone(BatchoptError):
    """A request was not carried out, and nobody is to blame: what it asked for is asked for again where it is
    needed."""


class CalledOff(Undone):
    """Nobody waits for this assignment any more."""


class OutOfStep(Undone):
    """The request before this one was lost on the way, and this one builds on it."""


class NodeRequest(NamedTuple):
    """A call of a method of `NodeActor`: made by `actor.request`, which a type checker sees."""

    method: str
    arguments: tuple[Any, ...]


class Envelope(NamedTuple):
    """The head of a request, whose arguments follow: `updates` to be taken in first, and the `method` to be called.

    Requests build on each other: `position` counts them, so that a node notices when one was lost on the way. They
    begin again at 0 with a higher `epoch`.
    """

    epoch: int
    position: int
    updates: Sequence[NodeRequest]
    method: str


@dataclass(frozen=True)
class NodeSetup:
    """The settings of a node's workers for as long as they live; `precode` is pickled, and `digests` are of the tensors
    of the program that comes along."""

    layout: Layout
    precode: bytes
    fixed_bits: bool
    timeout: float | None
    restarts: int
    threads: int
    devices: tuple[torch.device, ...] | None
    ranks: tuple[int, ...]
    world: int
    torch: TorchSettings
    digests: tuple[bytes, ...]


class Assignment(NamedTuple):
    """Chunks of one evaluation that a node is given, a run for each of its workers.

    `attempt` numbers the assignments to all nodes: where an evaluation needs more than one a node, they tell these
    apart.
    """

    kind: int
    attempt: int
    step: int
    runs: tuple[ChunkRun | None, ...]


class ResidualName(NamedTuple):
    """Names what an evaluation has left of a cell's gradient: the same bits, whoever computed it."""

    cell: int
    evaluation: int


class Cells(NamedTuple):
    """How gradients of `size` elements are compressed in an evaluation of so many chunks. `residuals`: for each cell
    that has one, which earlier evaluation has left it. Of all that earlier ones have left, `kept` may be needed."""

    compression: Compression
    evaluation: int
    chunks: int
    size: int
    residuals: Mapping[int, int]
    kept: frozenset[ResidualName] = frozenset()

    @property
    def number(self) -> int:
        """The number of cells."""
        return self.compression.cells(self.chunks)

    @property
    def level(self) -> int:
        """The level of the cells in the tree of chunks."""
        return self.compression.top(self.chunks)

    def before(self, cell: int) -> ResidualName | None:
        """The residual that is added to the gradient of a cell."""
        return ResidualName(cell, self.residuals[cell]) if cell in self.residuals else None

    def decode(self, code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of a cell from its code."""
        return self.compression.decode(code, self.number, self.size, dtype)


class PartialMessage(NamedTuple):
    """A merged partial: its place in the tree of chunks, and what `Partial` has, as bytes; of a cell the gradient may
    be compressed."""

    level: int
    position: int
    losses: tuple[float, ...]
    gradient: Bytes
    changes: Bytes
    used: bytes
    is_compressed: bool = False


class ResidualsMessage(NamedTuple):
    """The residuals that a node was asked for, as bytes; None for one that it does not have."""

    found: Mapping[ResidualName, Bytes | None]


class RowsMessage(NamedTuple):
    """What was collected of samples `start` up to `stop`: the rows of each column, as bytes."""

    start: int
    stop: int
    columns: list[Bytes]


class WorkerTimes(NamedTuple):
    """What one worker did: as in `Answer`, but spans count from when the node began, and hook results are pickled."""

    worker: int
    samples: int
    seconds: float
    spans: list[tuple[float, float, int, int]]
    results: bytes
    drew: bool


class WorkerStatus(NamedTuple):
    """The state of a worker, as in `WorkerInfo`."""

    pid: int
    device: str
    restarts: int
    alive: bool
    lost: bool


class AssignmentResult(NamedTuple):
    """The result of an assignment, after so many `seconds`; of a task also what was collected, and the `forms` of its
    results by chunk, pickled."""

    attempt: int
    sums: list[PartialMessage]
    work: list[WorkerTimes]
    seconds: float
    rows: Sequence[RowsMessage] = ()
    forms: bytes = b""


class NodeFailure(NamedTuple):
    """An exception on a node: as text, and as an object if its class is ours. Nothing of the user's is unpickled."""

    text: Failure
    error: BatchoptError | StateWritten | None

    @classmethod
    def of(cls, error: BaseException) -> NodeFailure:
        """Describe the exception. One of ours loses its cause when it is pickled: so the text has the worker's
        traceback."""
        text = describe(error)
        if not isinstance(error, (BatchoptError, StateWritten)):
            return cls(text, None)
        return cls(replace(text, traceback=getattr(error.__cause__, "text", "")), error)

    def is_a(self, *kinds: type[BaseException]) -> bool:
        """Whether it is an exception of one of these classes, which are ours."""
        return isinstance(self.error, kinds)


class NodeReply(NamedTuple):
    """The result of a request or its failure, and the state of the node's workers."""

    value: Any
    failure: NodeFailure | None
    workers: list[WorkerStatus]
