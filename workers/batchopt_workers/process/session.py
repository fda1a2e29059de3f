"""The state of a worker process, and the calls that the parent can make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any, NamedTuple

import torch

from batchopt_workers.compiled.form import Artifact
from batchopt_workers.data.layout import Layout
from batchopt_workers.data.memory import SharedBlock
from batchopt_workers.data.packing import Placement, assemble, unpack, views
from batchopt_workers.data.placing import Placing
from batchopt_workers.map.audit import audit, few, last_samples
from batchopt_workers.map.chunk import LoadedBatch
from batchopt_workers.map.clock import Clock
from batchopt_workers.map.evaluate import Evaluator
from batchopt_workers.map.module_state import ModuleState
from batchopt_workers.map.program import Program
from batchopt_workers.map.sums import Rows, SharedTotals
from batchopt_workers.map.unwritten import constants
from batchopt_workers.map.work import ChunkDone
from batchopt_workers.process.device import HOST, Constants, Mirror, moved, pin
from batchopt_workers.process.messages import Cut, Kind, Order, Start
from batchopt_workers.process.page import Board, Page
from batchopt_workers.process.torch_settings import TorchSettings, leave_contexts, set_module_hooks
from batchopt_workers.tasks.forms import FileOutput
from batchopt_workers.tasks.task import Evaluation, PrivateTotals, Task
from batchopt_workers.worker import Worker

# The names of the memory of a task, and of its own batch.
TASK, ASIDE = "task", "aside"


def batch_name(number: int) -> str:
    """The name by which workers know the memory of a batch."""
    return f"batch_{number}"


class Blocks:
    """The parent's shared memory, by name: as it is, or also private mappings of it, in which what the user's code
    writes stays in this process; one to work on, and a fresh one to compare with."""

    def __init__(self) -> None:
        self._shared: dict[str, SharedBlock] = {}
        self._private: dict[str, SharedBlock] = {}
        self._fresh: dict[str, SharedBlock] = {}

    def __getitem__(self, name: str) -> SharedBlock:
        """Return the shared memory of that name."""
        return self._shared[name]

    def private(self, name: str) -> SharedBlock:
        """Return the private mapping of that name."""
        return self._private[name]

    def fresh(self, name: str) -> SharedBlock:
        """Return a private mapping of that name that shows what the parent has written."""
        self._fresh[name].discard()
        return self._fresh[name]

    def map(self, name: str, fd: int, private: bool = False) -> None:
        """Map the memory behind `fd`, in place of earlier memory of that name."""
        self.drop(name)
        for mappings in (self._private, self._fresh) if private else ():
            mappings[name] = SharedBlock(os.dup(fd), private=True)
            mappings[name].release()
        block = SharedBlock(fd)
        block.release()
        self._shared[name] = block

    def drop(self, name: str) -> None:
        """Forget the memory of that name."""
        self._shared.pop(name, None)
        self._private.pop(name, None)
        self._fresh.pop(name, None)

    def discard(self) -> None:
        """Discard what was written to private mappings."""
        for block in self._private.values():
            block.discard()


class Sent(NamedTuple):
    """The program as it was sent; `read_only`: names of tensors that no chunk may write, by their index."""

    data: bytes
    placements: Sequence[Placement]
    read_only: Mapping[int, str]


class Copy(NamedTuple):
    """A copy of the program: the map function on it, its tensors in the order in which it was packed, its hooks of all
    modules, and its constants on another device."""

    evaluator: Evaluator
    tensors: Sequence[torch.Tensor]
    module_hooks: Mapping[str, Any]
    constants: Constants


class Held(NamedTuple):
    """A batch, and how it was sent."""

    loaded: LoadedBatch
    data: bytes
    placements: Sequence[Placement]


@dataclass
class Vectors:
    """X, of which the module's `parameters` are views, and the `rows` to sum gradients in, in shared memory; if this
    worker computes on another device, its `mirror` has copies there, of which `x` is that of X."""

    layout: Layout
    x: torch.Tensor
    parameters: list[torch.nn.Parameter]
    mirror: Mirror | None
    rows: Rows | None = None


class Session:
    """The state of a worker process. The parent's `CALL`s name its methods.

    Each takes one field of what a worker must have (the parent's record of that has the same order). A field may need
    those before it: parameters come before the module, and the module before all that concerns evaluations. Taking one
    again replaces it, so that the parent may send any field again at any time.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.worker = Worker(rank, world_size, HOST)
        self.awake = 0.0
        self.page: Page | None = None
        self._blocks = Blocks()
        self._torch: TorchSettings | None = None
        self._vectors: Vectors | None = None
        self._sent: Sent | None = None
        self._copy: Copy | None = None
        self._clock = Clock()
        self._loaded: dict[str, Held] = {}  # by the names of their memory
        self._start: Start | None = None  # from which the evaluator evaluates
        self._files: dict[int, FileOutput] = {}  # for results

    @property
    def evaluator(self) -> Evaluator:
        """The map function on this worker's module. Raise `RuntimeError` if there is none."""
        if self._copy is None:
            raise RuntimeError("no module was installed in this worker")
        return self._copy.evaluator

    @property
    def current(self) -> range:
        """The samples, numbered through all terms, of the last forward, if an evaluation was cut short."""
        return self._copy.evaluator.current if self._copy is not None else range(0)

    @property
    def vectors(self) -> Vectors:
        """X and the rows. Raise `RuntimeError` if there are none."""
        if self._vectors is None:
            raise RuntimeError("this worker was not given X")
        return self._vectors

    @property
    def rows(self) -> Rows | None:
        """The rows to sum gradients in, if there are any."""
        return None if self._vectors is None else self._vectors.rows

    def attach(self, name: str, fd: int) -> None:
        """Map the shared memory behind `fd` as `name`, in place of earlier memory of that name."""
        self._blocks.map(name, fd)

    def attach_copy(self, name: str, fd: int) -> None:
        """Map it as `attach` does, and also privately, so that what the user's code writes stays in this process."""
        self._blocks.map(name, fd, private=True)
        self._loaded.pop(name, None)

    def detach(self, name: str) -> None:
        """Forget the memory of that name."""
        self._loaded.pop(name, None)
        self._blocks.drop(name)

    def take_page(self, worker: int, workers: int, fd: int) -> None:
        """Find orders on the page of this worker, of `workers` in block "board"; wake the parent up through the event
        descriptor `fd`."""
        self.page = Board(self._blocks["board"], workers).page(worker)
        self.page.waker = fd

    def wake_parent(self) -> None:
        """Wake the parent up to look at the pages."""
        assert self.page is not None  # where the order was
        with suppress(BlockingIOError):  # it was woken up too often to count: it will look
            os.eventfd_write(self.page.waker, 1)

    def prepare(self, environment: dict[str, str], preparation: dict[str, Any], recursion: int) -> None:
        """Take over the parent's environment, path, arguments, working directory, and recursion limit."""
        sys.setrecursionlimit(recursion)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        spawn.prepare(preparation)

    def set_torch(self, settings: TorchSettings) -> None:
        """Compute with the parent's settings, and in its contexts."""
        settings.apply()
        self._torch = settings

    def use(self, devices: Mapping[int, torch.device]) -> None:
        """Compute on the device of this worker's rank."""
        self.worker.device = devices[self.worker.rank]
        if self.worker.device.type == "cuda":
            torch.cuda.set_device(self.worker.device)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's `function(worker, *arguments)`: precode, or a function of `run_on_workers`."""
        self._clock.restart()  # what it leaves in the module is looked for at the next evaluation
        return function(self.worker, *arguments)

    def use_parameters(self, layout: Layout) -> None:
        """Take X from block "parameters".

        X belongs to the parent: writing it here is a memory access fault, which ends the process.
        """
        parameters, device = self._blocks["parameters"], self.worker.device
        pin(parameters, device)
        parameters.protect()
        x = parameters.tensor(layout.dtype, (layout.size,))
        mirror = None if device == HOST else Mirror(layout, x, device)
        x = x if mirror is None else mirror.vector
        self._vectors = Vectors(layout, x, _parameters(layout, x), mirror)

    def install(self, data: bytes, placements: Sequence[Placement], read_only: Mapping[int, str]) -> None:
        """Build the module around X and its constants and state (block "program"), in place of the previous one; calls
        that concern evaluations must be made again. `read_only`: names of tensors that no chunk may write."""
        self._loaded.clear()
        self._clock.restart()
        before, vectors = self._copy, self.vectors
        self._sent, self._start, self._copy = Sent(data, placements, read_only), None, None
        self._begin_anew()
        evaluator = self.evaluator
        if vectors.rows is not None and vectors.rows.changes != evaluator.walk.state.size:
            vectors.rows = None
        if before is not None:
            evaluator.tasks.totals = before.evaluator.tasks.totals
            if evaluator.graphs is not None and before.evaluator.graphs is not None:
                evaluator.graphs.patience = 2 * before.evaluator.graphs.patience

    def _begin_anew(self) -> None:
        """Go on with a new copy of the program: the user's code may have left something in the present one, in the
        memory of batches, or among torch's modes and hooks of this process."""
        before, vectors = self._copy, self.vectors
        self._blocks.discard()
        vectors.parameters = _parameters(vectors.layout, vectors.x)  # those before may have been given other memory
        self._copy = copy = self._copied(self.worker, vectors.parameters, self._blocks.private("program"))
        self._set_ambient(copy)
        if vectors.mirror is not None:
            vectors.mirror.adopt(copy.evaluator, copy.constants)
        if before is not None:
            copy.evaluator.adopt(before.evaluator)
            copy.evaluator.compile(before.evaluator.compiled, copy.tensors)

    def _copied(self, worker: Worker, parameters: Sequence[torch.nn.Parameter], block: SharedBlock) -> Copy:
        """Return a copy of the program as it was sent, in a mapping of its memory, as that of `worker`."""
        sent, vectors = self._sent, self.vectors
        assert sent is not None
        tensors, shared = views(sent.placements, block), views(sent.placements, self._blocks["program"])
        program: Program = assemble(sent.data, tensors, parameters)
        originals = {id(tensor): twin for tensor, twin in zip(tensors, shared, strict=True)}
        there: Constants = {}
        if vectors.mirror is not None:
            owners = program.module, program.criterion, *program.loss_fns
            there = moved(owners, worker.device, parameters, originals)
        worker.module, worker.criterion = program.module, program.criterion
        state = ModuleState(program.module, vectors.mirror is None, originals)
        read_only = constants((name, tensors[i]) for i, name in sent.read_only.items())
        evaluator = Evaluator(program, worker, parameters, state, read_only)
        if vectors.mirror is not None:
            evaluator.walk.place = Placing(worker.device)
        return Copy(evaluator, tensors, program.module_hooks, there)

    def _audit(self, order: Order) -> None:
        """Audit the copies that an order ran on: see `audit`."""
        mine, vectors, start = self.evaluator, self.vectors, self._start
        assert start is not None
        name, samples = batch_name(start.batch), last_samples(order, mine)
        worker, held = Worker(self.worker.rank, self.worker.world_size, self.worker.device), self._loaded[name]

        def fresh() -> Evaluation:
            copy = self._copied(worker, _parameters(vectors.layout, vectors.x), self._blocks.fresh("program"))
            copy.evaluator.loss.weights = mine.loss.weights
            self._set_ambient(copy)
            with self._contexts():
                batch = unpack(held.data, held.placements, self._blocks.fresh(name))
                return copy.evaluator.eagerly(order.step, few(batch, samples))

        audit(mine, order, worker, fresh)

    def _set_ambient(self, copy: Copy) -> None:
        """Leave the modes of torch that the user's code has entered, and set those that were sent, and global hooks."""
        leave_contexts()
        if self._torch is not None:
            self._torch.apply()
        set_module_hooks(copy.module_hooks)

    def compile(self, artifacts: Sequence[Artifact]) -> None:
        """Evaluate by these artifacts."""
        assert self._copy is not None
        self.evaluator.compile(artifacts, self._copy.tensors)

    def use_hooks(self, hooked: bool) -> None:
        """Set whether prehook and posthook run."""
        self.evaluator.loss.hooked = hooked

    def load(self, name: str, data: bytes, placements: Sequence[Placement]) -> None:
        """Take the batch whose tensors are in block `name`, for orders that begin a step on it."""
        self._loaded[name] = Held(LoadedBatch(unpack(data, placements, self._blocks.private(name))), data, placements)
        self._forget_pieces()

    def _forget_pieces(self) -> None:
        """Forget what was brought to another device of batches before, or of another cut."""
        if self.evaluator.walk.place is not None:
            self.evaluator.walk.place.forget()

    def _begin(self, start: Start) -> None:
        """Begin a step on a batch, or take the module's state at the start of the step from the parent again."""
        before, self._start, name = self._start, None, batch_name(start.batch)
        if name in self._loaded and before != start:
            self._blocks.private(name).discard()  # writes of the user's code belong to the previous batch
            self.evaluator.loaded = self._loaded[name].loaded
        if self.vectors.mirror is not None:
            self.vectors.mirror.begin_step()
        self._forget_pieces()
        self.evaluator.walk.state.begin_step()
        self._start = start

    def load_aside(self, name: str, data: bytes, placements: Sequence[Placement]) -> None:
        """Take the batch of a task, whose tensors are in block `name`; that of the step stays."""
        self._blocks.private(name).discard()
        loaded = LoadedBatch(unpack(data, placements, self._blocks.private(name)), keeps=False)
        self._loaded[name] = Held(loaded, data, placements)

    def take_file(self, number: int, fd: int) -> None:
        """Use the file `fd` for results, by this number."""
        self._files[number] = FileOutput(fd)

    def drop_file(self, number: int) -> None:
        """Release the file of that number."""
        self._files.pop(number, None)

    def begin_task(self, data: bytes, placements: Sequence[Placement], file: int) -> None:
        """Begin a task, to which orders of tasks refer. Its tensors, if it has any, are in block `TASK`; its result
        rows go to the file of that number."""
        memory = self._blocks.private(TASK) if placements else None
        task: Task = unpack(data, placements, memory, self.vectors.parameters)
        evaluator = self.evaluator
        self._blocks["parameters"].protect(writable=task.writes)
        evaluator.tasks.begin(task, self._loaded[ASIDE].loaded.batch if task.aside else None)
        evaluator.tasks.output = self._files[file].begun()

    def write_outputs_to(self, file: int) -> None:
        """Write what the module returns in evaluations to the file of that number. A file that is gone was for an
        evaluation that is over."""
        output = self._files.get(file)
        self.evaluator.outputs = None if output is None else output.begun()

    def write_no_outputs(self) -> None:
        """Stop writing the outputs."""
        self.evaluator.outputs = None

    def sum_in(self, fd: int) -> None:
        """Sum totals in the file `fd`, which grows as needed."""
        self.evaluator.tasks.totals = SharedTotals(fd)

    def sum_nowhere(self) -> None:
        """Release the file that totals were summed in, until there is another one."""
        self.evaluator.tasks.totals = PrivateTotals()

    def cut_task(self, cut: Cut) -> None:
        """Set the cut of the task's batch."""
        self.evaluator.tasks.cut = cut

    def end_task(self) -> None:
        """Release everything of the task except the memory of its batch."""
        self._loaded.pop(ASIDE, None)
        self._blocks["parameters"].protect()
        self.detach(TASK)
        was_users = self.evaluator.tasks.is_users
        self.evaluator.tasks.end()
        if was_users:
            self._begin_anew()

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set the weights of the terms in f."""
        self.evaluator.loss.weights = weights

    def set_cut(self, cut: Cut) -> None:
        """Set the cut of the batch."""
        self.evaluator.cut = cut
        self._forget_pieces()

    def add_rows(self, first: int, count: int, terms: int) -> None:
        """Also sum in the `count` rows of block "rows", which replace all rows after the `first` ones."""
        vectors, changes, block = self.vectors, self.evaluator.walk.state.size, self._blocks["rows"]
        pin(block, self.worker.device)
        if vectors.rows is None:
            vectors.rows = Rows(vectors.layout, changes, count, block, terms=terms)
        else:
            vectors.rows.cut(first)
            vectors.rows.grow(count, block)
        if vectors.mirror is not None:
            vectors.mirror.make_rows(first + count, changes)

    def set_world(self, size: int, threads: Mapping[int, int], awake: float) -> None:
        """Set the number of workers to `size`, use the threads of this worker's rank, and stay awake for `awake`
        seconds after a short order."""
        self.awake = awake
        self.worker.world_size = size
        torch.set_num_threads(threads[self.worker.rank])

    def evaluate(self, order: Order, start: Start) -> Iterator[ChunkDone]:
        """Carry out an order, from that start; at evaluations 1, 2, 4, 8, ... audit the copies that it ran on."""
        try:
            if start != self._start:
                self._begin(start)
            vectors, is_f = self.vectors, order.kind is Kind.EVALUATE
            is_audited = is_f and self._clock.begin(order.evaluation) and self._clock.is_due
            evaluate = self.evaluator.evaluate if vectors.mirror is None else vectors.mirror.evaluate
            with self._contexts():
                for done in evaluate(order, vectors.rows):
                    if is_audited and done.next == order.last:
                        self._audit(order)
                    yield done
        except Exception:
            if self._copy is not None:
                self._begin_anew()
            raise

    def _contexts(self) -> AbstractContextManager[Any]:
        return self._torch.contexts() if self._torch is not None and self._torch.has_contexts else nullcontext()


def _parameters(layout: Layout, x: torch.Tensor) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(view) for view in layout.views(x)]


# Calls that are followed by a descriptor through the pipe: it is their last argument.
WITH_DESCRIPTOR = (
    Session.attach,
    Session.attach_copy,
    Session.take_file,
    Session.sum_in,
    Session.take_page,
)
