"""The interface of a backend, and the records that cross it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._mapreduce.answers import Answer
from batchopt._mapreduce.compression import Compression
from batchopt._program.flatten import Flat
from batchopt_workers.data.batch import Batch
from batchopt_workers.map.buffers import StepBuffers
from batchopt_workers.map.evaluate import Program
from batchopt_workers.process.messages import Cut, Order
from batchopt_workers.tasks.forms import Column
from batchopt_workers.tasks.task import Task
from batchopt_workers.worker import Hook, Precode

T = TypeVar("T")


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
    """All that a backend needs to start.

    `workers` None: as many as there is room for. `fixed_bits`: chunks are fixed, and so must be all that the bits
    depend on. `restarts` None: 4 for each worker. `threads` None: as many as the backend thinks right. `options` are
    the user's for this backend alone. `compression` is that of `evaluate_compressed`. `ranks` of the workers, where
    they are some of `world` that other backends have the others of.
    """

    workers: int | None
    fixed_bits: bool
    timeout: float | None
    restarts: int | None
    threads: int | None
    devices: tuple[torch.device, ...] | None
    precode: Precode | None
    program: Program
    flat: Flat
    parameters: list[torch.nn.Parameter]
    buffers: StepBuffers
    compression: Compression | None = None
    ranks: tuple[int, ...] | None = None
    world: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def restarts_of(self, workers: int) -> int:
        """Return how many of `workers` may be replaced."""
        return 4 * workers if self.restarts is None else self.restarts


@dataclass(frozen=True)
class Prepared:
    """A batch that workers can read; each backend adds what it needs to know of it."""

    batch: Batch


# Seconds of the longest evaluation that is repeated: a longer one has orders, so that a fault costs the current chunk.
LONGEST = 0.25
# Something to do in this process while the workers compute.
Meanwhile = Callable[[], None]


class Repeated(NamedTuple):
    """An evaluation that was repeated: the losses of each partial, in the order of the answers before, and when each of
    the workers that took part began, and how long it took."""

    losses: Sequence[Sequence[float]]
    times: Sequence[Sequence[float]]


class Backend(ABC):
    """Workers that evaluate chunks of one module at the current X. The parent is its only caller.

    Class methods answer what has to be known before anything starts: they start nothing, and ask no other machine.
    """

    # Whether workers are on this machine, so that a single one may as well be this process.
    local: ClassVar[bool] = False
    # Whether this process prints and writes files: of several that do the same, one does.
    is_main: bool = True
    # The last evaluation, if it went by the book, and can be repeated.
    repeatable: Any = None
    # The paces of workers whose work came too late to count in the last evaluation, by rank: samples, and the seconds
    # that they took, or will have exceeded.
    late: Mapping[int, tuple[int, float]] = MappingProxyType({})

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        """The number of workers that `parallelize` asks for; None for as many as there is room for at any time. Raises
        `TypeError` or `ValueError` for what is no such number, or more than there can be."""
        return read_parallelize(parallelize)

    @classmethod  # noqa: B027  # many backends can do everything
    def check(cls, setup: Setup) -> None:
        """Raise `TypeError`, `ValueError` or `BatchoptError` for what this backend cannot do."""

    @classmethod  # noqa: B027  # few backends take long to start
    def anticipate(cls, setup: Setup) -> None:
        """Let something begin that takes long when this backend starts, which it will soon."""

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Start the workers of a `setup` that was checked. Raises `WorkerStartError`, and `WorkerError` if precode
        raises."""

    @property
    @abstractmethod
    def workers(self) -> list[WorkerInfo]:
        """Public records of the workers, in rank order."""

    @abstractmethod
    def set_hooks(self, prehook: Hook | None, posthook: Hook | None) -> None:
        """Use these hooks from now on. Raises `TypeError` for hooks that cannot be sent."""

    @abstractmethod
    def use_hooks(self, hooked: bool) -> None:
        """Run hooks from now on, or run none."""

    @abstractmethod
    def include_state(self, names: Collection[str]) -> None:
        """Let evaluations change these tensors of the module, too, from now on; `Setup.buffers` has them already."""

    @abstractmethod
    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        """Bring `batch` to where the workers can read it. `ahead`: the present batch is still needed."""

    @abstractmethod
    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        """Begin a step on what was prepared last, with the program as the user has it now, and these weights of the
        terms in f. Raises `TypeError` for a program that cannot be sent any more."""

    def restart_step(self) -> None:  # noqa: B027  # of use only where workers share the module's state
        """The module's state, which has changed since the step began, is that of its start again, for what comes
        next."""

    @abstractmethod
    def evaluate(self, cut: Cut, orders: Sequence[Order | None], meanwhile: Meanwhile | None = None) -> list[Answer]:
        """Evaluate the chunks of all orders. `orders[i]` is meant for worker `i`; what it does not get done another one
        does. Answers come in rank order. Where workers are other processes, `meanwhile` is called as soon as they are
        busy.

        Raises `WorkerError` if the user's code raised; the workers can be used on. Raises `StateWritten` for a forward
        that writes what was taken for constants, `PoisonChunkError` and `AllWorkersLostError`.
        """

    def repeat(
        self, which: object, number: int, step: int, seconds: float, meanwhile: Meanwhile | None
    ) -> Repeated | None:
        """Make evaluation `number`, of that step, as the one that was `repeatable`, which took `seconds`: the
        same chunks of the loaded batch by the same workers, summed in the same memory. None where anything is not as it
        was then: it has to be ordered, with the same number. Raises what `evaluate` raises."""
        return None

    @abstractmethod
    def set_direction(self, direction: torch.Tensor) -> None:
        """Let orders for a product multiply the Hessian with `direction`: shape `(n,)`, X's dtype."""

    @abstractmethod
    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        """Let orders of tasks be about this one: on the loaded batch, or on this `batch`, which has one part, from now
        on; the loaded one stays as it is. `follow`: take the program as the user has it now; returns whether that is
        another one than before, so that the loaded batch is none of its steps any more. Raises `TypeError` for what
        cannot be sent."""

    @abstractmethod
    def keep_outputs(self, keep: bool) -> None:
        """Let evaluations write what the module returns, or not."""

    @abstractmethod
    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        """The rows that the orders of the last evaluation have written, of `samples` samples in all: one tensor for
        each column, which nobody else writes any more."""

    @abstractmethod
    def end_task(self) -> None:
        """Hold nothing of the task any more."""

    def room(self) -> int:
        """Return how many more workers would fit; 0 for backends whose room never changes."""
        return 0

    @abstractmethod
    def resize(self, workers: int) -> None:
        """Have `workers` workers; fewer than before are those of the lowest ranks. Raises what starting them raises."""

    @abstractmethod
    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """Call `function(worker, *arguments)` in each worker; returns the values in rank order."""

    def once(self, function: Callable[[], T]) -> T:
        """Call `function` in one process only (the one that writes files) and return, or raise, its outcome
        everywhere."""
        return function()

    def stop(self) -> None:  # noqa: B027  # of use only where a call waits
        """Make a blocked call raise `BatchoptError`, so that `close` can proceed; do nothing if no call waits."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; does nothing the second time."""


class CompressingBackend(Backend):
    """One whose gradients cross a network to get here, so that it pays to compress them."""

    @abstractmethod
    def evaluate_compressed(
        self,
        cut: Cut,
        orders: Sequence[Order | None],
        taken: int,
        kept: int,
        meanwhile: Meanwhile | None = None,
    ) -> list[Answer]:
        """Evaluate with gradients compressed by `Setup.compression`, after adding the residuals of evaluation `taken`
        (0: none). Later calls may continue from this one, from `taken` or from `kept`, so that nothing is lost if this
        one turns out not to count. Raises what `evaluate` raises, and `DoesNotFit`."""

    @abstractmethod
    def residuals(self, evaluation: int) -> dict[int, torch.Tensor]:
        """Return the residuals that compression left in an evaluation, by part of the sum."""

    @abstractmethod
    def restore_residuals(self, evaluation: int, residuals: Mapping[int, torch.Tensor]) -> None:
        """Let this be what compression has left in an evaluation of that number."""
