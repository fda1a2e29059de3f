"""The state of a worker process, and the calls that the parent can make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

import torch

from batchopt_workers.evaluate.chunk import LoadedBatch
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.program import Worker
from batchopt_workers.evaluate.sums import Rows, SharedTotals
from batchopt_workers.evaluate.work import ChunkDone
from batchopt_workers.functions.forms import FileOutput
from batchopt_workers.functions.task import PrivateTotals, Task
from batchopt_workers.life.blocks import Blocks
from batchopt_workers.life.copies import Copies, Held, Sent, Vectors, parameters_of
from batchopt_workers.life.device import HOST, Mirror, pin
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.shortcuts.form import Artifact
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.orders import Cut, Kind, Order, Start
from batchopt_workers.wire.packing import Placement, unpack
from batchopt_workers.wire.page import Board, Page

# The names of the memory of a task, and of its own batch.
TASK, ASIDE = "task", "aside"


def batch_name(number: int) -> str:
    """The name by which workers know the memory of a batch."""
    return f"batch_{number}"


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
        self._vectors: Vectors | None = None
        self._copies = Copies(self.worker, self._blocks)
        self._loaded: dict[str, Held] = {}  # by the names of their memory
        self._start: Start | None = None  # from which the evaluator evaluates
        self._files: dict[int, FileOutput] = {}  # for results

    @property
    def evaluator(self) -> Evaluator:
        """The map function on this worker's module. Raise `RuntimeError` if there is none."""
        if self._copies.present is None:
            raise RuntimeError("no module was installed in this worker")
        return self._copies.present.evaluator

    @property
    def current(self) -> range:
        """The samples, numbered through all terms, of the last forward, if an evaluation was cut short."""
        copy = self._copies.present
        return range(0) if copy is None else copy.evaluator.current

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
        self._copies.torch = settings

    def use(self, devices: Mapping[int, torch.device]) -> None:
        """Compute on the device of this worker's rank."""
        self.worker.device = devices[self.worker.rank]
        if self.worker.device.type == "cuda":
            torch.cuda.set_device(self.worker.device)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's `function(worker, *arguments)`: precode, or a function of `run_on_workers`."""
        self._copies.clock.restart()  # what it leaves in the module is looked for at the next evaluation
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
        self._vectors = Vectors(layout, x, parameters_of(layout, x), mirror)

    def install(self, data: bytes, placements: Sequence[Placement], read_only: Mapping[int, str]) -> None:
        """Build the module around X and its constants and state (block "program"), in place of the previous one; calls
        that concern evaluations must be made again. `read_only`: names of tensors that no chunk may write."""
        self._loaded.clear()
        vectors, self._start = self.vectors, None
        self._copies.install(Sent(data, placements, read_only), vectors)
        if vectors.rows is not None and vectors.rows.changes != self.evaluator.walk.state.size:
            vectors.rows = None

    def compile(self, artifacts: Sequence[Artifact]) -> None:
        """Evaluate by these artifacts."""
        self._copies.compile(artifacts)

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
            self._copies.begin_anew(self.vectors)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set the weights of the terms in f."""
        self.evaluator.loss.weights = weights

    def set_cut(self, cut: Cut) -> None:
        """Set the cut of the batch."""
        self.evaluator.cut_into(cut)
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
            vectors, copies, is_f = self.vectors, self._copies, order.kind is Kind.EVALUATE
            is_audited = is_f and copies.clock.begin(order.evaluation) and copies.clock.is_due
            evaluate = self.evaluator.evaluate if vectors.mirror is None else vectors.mirror.evaluate
            with copies.contexts():
                for done in evaluate(order, vectors.rows):
                    if is_audited and done.next == order.last:
                        name = batch_name(start.batch)
                        copies.audit(order, name, self._loaded[name], vectors)
                    yield done
        except Exception:
            if self._copies.present is not None:
                self._copies.begin_anew(self.vectors)
            raise
