"""Where evaluations run. One file a backend; each is imported when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch

from batchopt._program.flatten import Flat
from batchopt_workers.batch import Batch
from batchopt_workers.buffers import StepBuffers
from batchopt_workers.evaluate import Program
from batchopt_workers.messages import Cut, Order
from batchopt_workers.tree import Node
from batchopt_workers.worker import Hook, Precode

BACKENDS = {
    "serial": "batchopt.backends.serial:SerialBackend",
    "process": "batchopt.backends.process.backend:ProcessBackend",
    "ray": "batchopt.backends.ray.backend:RayBackend",
}


@dataclass
class WorkerInfo:
    """One worker as the parent sees it. `speed` is in samples per second (None until measured; relative if the user
    fixed it), `samples` and `busy_seconds` count all it evaluated, `restarts` how often its process was replaced;
    `alive` is False while there is none that can work, and `lost` True once there will be none any more."""

    rank: int
    pid: int
    host: str
    device: torch.device
    speed: float | None = None
    samples: int = 0
    busy_seconds: float = 0.0
    restarts: int = 0
    alive: bool = True
    lost: bool = False


@dataclass(frozen=True)
class Setup:
    """What a backend needs to start. `fixed_bits`: chunks are fixed, and so must be all that the bits depend on.

    `ranks` of its workers, where they are some of `world` that other backends have the others of. `options` are the
    user's, passed through.
    """

    workers: int
    fixed_bits: bool
    timeout: float | None
    restarts: int
    threads: int | None
    devices: tuple[torch.device, ...] | None
    precode: Precode | None
    program: Program
    flat: Flat
    parameters: list[torch.nn.Parameter]
    buffers: StepBuffers
    ranks: tuple[int, ...] | None = None
    world: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Partial(NamedTuple):
    """A merged run of chunks: the loss sum of each term, the gradient sum (in memory that the parent may overwrite until the next
    evaluation), the changes of buffers, and which parameters had a gradient. Of a product, its sum takes the place of the gradient's."""

    losses: tuple[float, ...]
    gradient: torch.Tensor
    changes: torch.Tensor
    used: bytes


class Span(NamedTuple):
    """Chunks `first` up to `last` were evaluated in `seconds`, from `began` (on `time.perf_counter`) on."""

    began: float
    seconds: float
    first: int
    last: int


@dataclass(frozen=True)
class Answer:
    """What one worker contributed to an evaluation: `samples` evaluated in `seconds`, merged to `partials` (those of two
    answers may contain the same chunk), what the posthook returned, by chunk, and when it was busy."""

    rank: int
    samples: int
    seconds: float
    partials: list[tuple[Node, Partial]]
    results: dict[int, list[Any]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """A batch that workers can read; each backend adds what it needs to know of it."""

    batch: Batch


# Something to do in this process while the workers compute.
Meanwhile = Callable[[], None]


class Backend(ABC):
    """Workers that evaluate chunks of one module at the current X. The parent is its only caller."""

    @property
    @abstractmethod
    def workers(self) -> list[WorkerInfo]:
        """What the user may know of each worker, in rank order."""

    @abstractmethod
    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these hooks from now on. Raises `TypeError` for hooks that cannot be sent."""

    @abstractmethod
    def use_hooks(self, hooked: bool) -> None:
        """Whether hooks run from now on."""

    @abstractmethod
    def include_state(self, names: Collection[str]) -> None:
        """From now on evaluations may change these tensors of the module, too; `Setup.buffers` has them by now."""

    @abstractmethod
    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        """Bring `batch` to where the workers can read it. `ahead`: while the present one is still needed."""

    @abstractmethod
    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        """Begin a step on what was prepared last, with the program as it is now in this process, and these weights of
        the terms in f. Raises `TypeError` for a program that cannot be sent any more."""

    @abstractmethod
    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        """Evaluate the chunks of all orders: `orders[i]` is meant for worker `i`, but what it does not get done another
        one does. Answers come in rank order. Where workers are other processes, `meanwhile` is called as soon as they
        are busy.

        Raises `WorkerError` if the user's code raised; the workers can be used on. Raises `StateWritten` for a forward
        that writes what was taken for constants, `PoisonChunkError` and `AllWorkersLostError`.
        """

    @property
    def late(self) -> Mapping[int, tuple[int, float]]:
        """What the last evaluation has shown of workers whose work came too late to count, by rank: so many samples took so
        many seconds, or will have taken more."""
        return {}

    @abstractmethod
    def set_direction(self, direction: torch.Tensor) -> None:
        """Let orders for a product multiply the Hessian with `direction`: shape `(n,)`, X's dtype."""

    @abstractmethod
    def probe(self, cut: Cut, order: Order) -> dict[int, float]:
        """The seconds that each worker needs for the same order, by rank; a worker that is lost, or very late, is left
        out. Raises `WorkerError` and `StateWritten`."""

    def room(self) -> int:
        """How many more workers there is room for, where that changes: machines may have joined."""
        return 0

    @abstractmethod
    def resize(self, workers: int) -> None:
        """Have so many workers, of which those of the lowest ranks are kept. Raises what starting them raises."""

    @abstractmethod
    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """`function(worker, *arguments)` on each worker; the values in rank order."""

    def stop(self) -> None:  # noqa: B027  # of use only where a call waits
        """Have the call that waits for workers raise `BatchoptError` soon: somebody wants to close this, and was told to
        wait for its end. Does nothing where no call waits."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; does nothing the second time."""


def anticipate(name: str, workers: int, threads: int | None) -> None:
    """Let begin what takes long when the backend `name` starts; with `threads` for each of `workers`, or None."""
    if name == "process" and workers > 1:
        import_module("batchopt.backends.process.forkserver").anticipate(workers, threads)


def is_alone(name: str, workers: int) -> bool:
    """Whether so many workers of the backend `name` are this process itself: a single one needs no other on this machine."""
    return workers == 1 and name in ("serial", "process")


def start_backend(name: str, setup: Setup) -> Backend:
    """Start the backend `name`."""
    module, _, attribute = BACKENDS["serial" if is_alone(name, setup.workers) else name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)(setup)
    return backend
