"""What is said between the parent and the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from batchopt.backends.ledger import Run
from batchopt.backends.ray.transfer import Bytes
from batchopt.errors import BatchoptError
from batchopt_workers.failures import Failure, describe
from batchopt_workers.layout import Layout
from batchopt_workers.torch_settings import TorchSettings
from batchopt_workers.watch import StateWritten


class Task(Enum):
    """What a node was asked to do, and how error messages say it."""

    HANDSHAKE = "starting"
    START = "receiving the module"
    EVALUATE = "evaluating"
    PROBE = "being measured"
    RUN = "running a function"
    RESIZE = "being resized"
    CLOSE = "ending"


class Question(Enum):
    """What a node is asked about a share while it evaluates it."""

    RELEASE = "give up half of what no worker has begun"
    CALL_OFF = "stop: nobody waits for this share"
    PING = "give a sign"


class Undone(BatchoptError):
    """What was asked was not done, by nobody's fault: it is given to somebody again."""


class CalledOff(Undone):
    """Nobody waits for this share any more."""


class OutOfStep(Undone):
    """A request was lost on the way, on which this one builds."""


class Request(NamedTuple):
    """A method of the actor, by name, and its arguments."""

    method: str
    arguments: tuple[Any, ...]


class Envelope(NamedTuple):
    """What comes before a task's arguments: `updates` to be taken in first, and the method that the arguments are for.

    `position` numbers the requests that build on each other, of which none may be lost on the way. `epoch` is a higher
    number where they begin anew.
    """

    epoch: int
    position: int
    updates: Sequence[Request]
    method: str


@dataclass(frozen=True)
class Contract:
    """What a machine's workers are to do for as long as they live; precode is pickled. `digests`: of the tensors of the
    program that comes along."""

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


class Share(NamedTuple):
    """One evaluation's part of a machine: the chunks of each of its workers. `attempt` is its number among all shares of
    all machines: an evaluation that does not get by with one a machine gives more."""

    kind: int
    attempt: int
    step: int
    runs: tuple[Run | None, ...]


class Sum(NamedTuple):
    """A merged partial: which node of the tree, and what `Partial` has."""

    level: int
    position: int
    losses: tuple[float, ...]
    gradient: Bytes
    changes: Bytes
    used: bytes


class Work(NamedTuple):
    """What a worker did: as `Answer`, with spans counted from when the machine was asked, and hook results pickled."""

    worker: int
    samples: int
    seconds: float
    spans: list[tuple[float, float, int, int]]
    results: bytes


class Condition(NamedTuple):
    """What is known of a worker, as in `WorkerInfo`."""

    pid: int
    device: str
    restarts: int
    alive: bool
    lost: bool


class Yield(NamedTuple):
    """What a share came to, in `seconds`."""

    attempt: int
    sums: list[Sum]
    work: list[Work]
    seconds: float


class Failed(NamedTuple):
    """An exception on a node, as text; and as it is, if its class is ours."""

    text: Failure
    error: BatchoptError | StateWritten | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """What is to be said of the exception. Its cause is not sent: of ours, the text has the traceback in the worker."""
        text = describe(error)
        if not isinstance(error, (BatchoptError, StateWritten)):
            return cls(text, None)
        return cls(replace(text, traceback=getattr(error.__cause__, "text", "")), error)

    def is_a(self, *kinds: type[BaseException]) -> bool:
        """Whether it is of one of these classes of ours."""
        return isinstance(self.error, kinds)


class Reply(NamedTuple):
    """What a request came to, and how the workers are."""

    value: Any
    failed: Failed | None
    workers: list[Condition]
