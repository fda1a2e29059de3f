"""The interface of a backend, and the records that cross it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._mapreduce.reduce import Answers
from batchopt._program.flat_module import Gradient
from batchopt._program.flatten import Flat
from batchopt.backends.nodes.compression import Compression
from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.program import Hook, Precode, Program
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.functions.forms import Column
from batchopt_workers.functions.task import Task
from batchopt_workers.shortcuts.form import Artifact
from batchopt_workers.wire.orders import Cut, Order

T = TypeVar("T")


@dataclass
class WorkerInfo:
    """One worker as the parent sees it. `speed` is in samples per second (None until measured; relative if the user
    fixed it), `samples` and `busy_seconds` count all it evaluated, `restarts` how often its process was replaced;
    `alive` is False while no process can work as it, and `lost` True once none will any more. `graph`: on a card, in
    this process, what was recorded there, or why evaluations are eager."""

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
    graph: str | None = None

    def __repr__(self) -> str:
        speed = "speed unknown" if self.speed is None else f"{self.speed:.4g} samples/s"
        did = f"{self.samples} samples in {self.busy_seconds:.3g} s, {self.restarts} restarts"
        end = "lost" if self.lost else "alive" if self.alive else "not alive"
        return f"WorkerInfo({self.rank}: pid {self.pid} on {self.host}, {self.device}, {speed}, {did}, {end})"


class Mode(NamedTuple):
    """The mode of evaluations, until it is changed: with these hooks, if they are `hooked`; whether the module's
    `outputs` are kept; and, if this process is the worker, the number of `threads` (None: as torch is set). Pieces for
    which there are `artifacts` are evaluated by these until the program is another `version`."""

    prehook: Hook | None = None
    posthook: Hook | None = None
    hooked: bool = True
    outputs: bool = False
    threads: int | None = None
    artifacts: tuple[Artifact, ...] = ()

    def is_of(self, program: Program) -> bool:
        """Tell whether that program has these hooks."""
        return self.prehook is program.prehook and self.posthook is program.posthook


@dataclass(frozen=True)
class Setup:
    """All that a backend needs to start.

    `workers` None: as many as there is room for. `fixed_bits`: chunks are fixed, and so must be everything else that
    the bits depend on. `restarts` None: 4 for each worker. `threads` None: chosen by the backend. `options` are those
    of this backend. `compression`: the format of `evaluate_compressed`. `ranks`: those of the workers, if they are some
    of `world` workers, of which other backends have the rest.
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
    buffers: ModuleState
    compression: Compression | None = None
    ranks: tuple[int, ...] | None = None
    world: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> Mode:
        """The mode in which workers start."""
        program = self.program
        return Mode(program.prehook, program.posthook, threads=self.threads)

    def restarts_of(self, workers: int) -> int:
        """Return how many of `workers` may be replaced."""
        return 4 * workers if self.restarts is None else self.restarts


@dataclass(frozen=True)
class Prepared:
    """A batch that workers can read; each backend adds its own information."""

    batch: Batch


# Something to do in this process while the workers compute.
Meanwhile = Callable[[], None]
# The first chunk of a worker's share, and the one after its last.
Run = tuple[int, int]


class Backend(ABC):
    """Workers that evaluate chunks of one module at the current X. The parent is its only caller.

    Class methods are for questions before anything starts: they start nothing, and ask no other machine.
    """

    # Whether workers are on this machine, so that a single one may as well be this process.
    local: ClassVar[bool] = False
    # Whether its workers can evaluate by `Mode.artifacts`.
    compiles: ClassVar[bool] = False
    # Whether this process prints and writes files: one of several that run the same script does.
    is_main: bool = True

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        """Return the number of workers requested by `parallelize`; None for as many as there is room for at any time.
        Raises `TypeError` or `ValueError` for anything else, or more than there can be."""
        return read_parallelize(parallelize)

    @classmethod  # noqa: B027  # many backends can do everything
    def check(cls, setup: Setup) -> None:
        """Raise `TypeError`, `ValueError` or `BatchoptError` for a setup that is impossible with this backend."""

    @classmethod  # noqa: B027  # few backends take long to start
    def anticipate(cls, setup: Setup) -> None:
        """Begin what takes long when this backend starts, which it will soon."""

    @classmethod
    def is_anticipated(cls) -> bool:
        """Tell whether what `anticipate` began is complete, so that this backend starts fast."""
        return True

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Start the workers of a checked `setup`. Raises `WorkerStartError`, and `WorkerError` if precode raises."""

    @property
    @abstractmethod
    def workers(self) -> list[WorkerInfo]:
        """Public records of the workers, in rank order."""

    @property
    def version(self) -> object:
        """The version of the program that workers have: another object after each change of it. None if it does not
        compile."""
        return None

    @abstractmethod
    def set_mode(self, mode: Mode) -> None:
        """Evaluate in this mode from now on; `Setup.buffers` has its state already. Raises `TypeError` for hooks that
        cannot be sent: then the mode is as before."""

    @abstractmethod
    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        """Place `batch` where the workers can read it. `ahead`: the current batch is still needed."""

    @abstractmethod
    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        """Begin a step on the batch prepared last, with the user's current program and these weights of the terms in f.
        Raises `TypeError` for a program that can no longer be sent."""

    @abstractmethod
    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        """Carry out `order`, which is about all chunks that anybody is given, from the module's state in
        `Setup.buffers`, whose `starts` count its starts.

        `runs[i]` is meant for worker `i`; others take over what it does not complete. Answers are in rank order. If
        workers are other processes, `meanwhile` is called as soon as they are busy. If nothing is to be summed, the
        gradient may be written to `into` at once.

        Raises `WorkerError` if the user's code raised, or keeps something on which f depends; the workers remain
        usable. Raises `PoisonChunkError` and `AllWorkersLostError`.
        """

    @abstractmethod
    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        """Begin a task, on the loaded batch or on this `batch`, which has one part; the loaded one stays. `follow`:
        take over the user's current program; return whether it has changed, so that the loaded batch belongs to no step
        of it. Raises `TypeError` for what cannot be sent."""

    @abstractmethod
    def collected(self, columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
        """Return the rows written by the orders of the last evaluation, of `samples` samples in total: one tensor for
        each column, which is not written any more."""

    @abstractmethod
    def end_task(self) -> None:
        """End the task, and release what belongs to it."""

    def room(self) -> int:
        """Return how many more workers would fit; 0 for backends whose room never changes."""
        return 0

    @abstractmethod
    def resize(self, workers: int) -> None:
        """Change the number of workers; those of the lowest ranks are kept. Raises what starting them raises."""

    @abstractmethod
    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """Call `function(worker, *arguments)` in each worker; return the values in rank order."""

    def once(self, function: Callable[[], T]) -> T:
        """Call `function` in one process only (the one that writes files) and return, or raise, its outcome
        everywhere."""
        return function()

    # Whether other processes make the same calls.
    has_peers = False

    def first(self, value: T | None) -> T | None:
        """Return the first value that is not None of those that all who make the same calls give."""
        return value

    def stop(self) -> None:  # noqa: B027  # of use only where a call waits
        """Make a blocked call raise `BatchoptError`, so that `close` can proceed; do nothing if no call waits."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; a second call does nothing."""


class CompressingBackend(Backend):
    """A backend whose gradients cross a network, so that compressing them can pay."""

    @abstractmethod
    def evaluate_compressed(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        """Evaluate with gradients compressed by `Setup.compression`. Raises what `evaluate` raises, and
        `DoesNotFit`."""
