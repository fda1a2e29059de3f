"""The worker processes of one node: a group of workers whose batch comes in parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchopt.backends.base import Setup
from batchopt.backends.nodes.transfer import BatchBuffer, BatchSlice, PackedBytes
from batchopt.backends.process.group import WorkerGroup
from batchopt.backends.process.shared_program import Holder
from batchopt.backends.process.worker import Activity, SessionCall, call, call_with_block
from batchopt_workers.data.batch import Batch, Numbering
from batchopt_workers.data.packing import unpack
from batchopt_workers.map.buffers import StepBuffers
from batchopt_workers.map.evaluate import Program
from batchopt_workers.process.session import ASIDE, ASIDE_BATCH, PIECE, Session
from batchopt_workers.process.torch_settings import TorchSettings

# The name by which workers know the memory of the batch.
BATCH = "batch 0"


@dataclass(frozen=True)
class _LoadedBatch:
    """The batch of a step, and what workers were sent of it: the call that takes it, and those that fill its lists."""

    batch: Batch
    buffer: BatchBuffer
    load: SessionCall
    pieces: list[list[SessionCall]]


class NodeWorkers:
    """The workers of some ranks of all."""

    def __init__(self, setup: Setup, torch: TorchSettings) -> None:
        self.torch = torch  # as it is in the parent when it asks for an evaluation
        self._ranks = setup.ranks or ()
        self._program = setup.program
        self._loaded: _LoadedBatch | None = None
        self._task_pieces = 0  # how many were sent
        self.group = WorkerGroup(setup, Holder(lambda: self.torch, lambda: self._program.module_hooks))

    def replace_program(self, program: Program, buffers: StepBuffers) -> None:
        """Evaluate another program from the next step on."""
        self._program = program
        self.group.replace_program(program, buffers)

    def open(self, buffer: BatchBuffer, weights: tuple[float, ...]) -> None:
        """Begin a step on a batch whose samples come later, with `fill`."""
        manifest = buffer.manifest
        batch: Batch = unpack(manifest.data, manifest.placements, buffer.block)
        load = call(Activity.BATCH, Session.load, BATCH, manifest.data, manifest.placements)
        before = [] if self._loaded is None else self._loaded.pieces
        for number in range(len(before)):
            self.group.tell(f"{PIECE}{number}")
        self._loaded = _LoadedBatch(batch, buffer, load, [])
        self._begin_step(self._loaded, weights)

    def reopen(self, weights: tuple[float, ...]) -> None:
        """Begin another step on the same batch, with the samples that are here."""
        assert self._loaded is not None
        if self._loaded.pieces:  # workers have to take the batch again, or they would do so after the pieces
            self._loaded = replace(self._loaded, load=self._loaded.load._replace())
        self._begin_step(self._loaded, weights)
        for number, calls in enumerate(self._loaded.pieces):  # which workers forget when a step begins
            self.group.tell(f"{PIECE}{number}", *calls)

    def _begin_step(self, loaded: _LoadedBatch, weights: tuple[float, ...]) -> None:
        self.group.begin_step(loaded.batch, weights)
        self.group.take_batch(BATCH, loaded.buffer.block, loaded.load)

    def fill(self, part: BatchSlice) -> None:
        """Send the workers what a slice has in lists. Its rows they see in the batch's memory."""
        if part.lists is None:
            return
        assert self._loaded is not None
        name, lists = f"{PIECE}{len(self._loaded.pieces)}", part.lists
        calls = [
            call_with_block(Activity.SAMPLES, Session.attach_copy, name, lists.unload()),
            call(Activity.SAMPLES, Session.fill, name, part.term, part.start, lists.data, lists.placements),
        ]
        self._loaded.pieces.append(calls)
        self.group.tell(name, *calls)

    def begin_task(self, task: PackedBytes, buffer: BatchBuffer | None, numbering: Numbering, reading: bool) -> None:
        """Let orders of tasks be about this one; `buffer` is for the samples of its own batch, if it has one."""
        calls: list[SessionCall] = []
        if buffer is not None:
            manifest = buffer.manifest
            self.group.attach(ASIDE_BATCH, buffer.block)
            calls = [call(Activity.BATCH, Session.load_aside, ASIDE_BATCH, manifest.data, manifest.placements)]
        self.group.follow()
        self._forget_task_pieces()
        memory = task.unload() if task.placements else None
        self.group.send_task(task.data, task.placements, memory, calls, numbering, reading)

    def fill_task(self, part: BatchSlice) -> None:
        """Send the workers what a slice of the task's batch has in lists."""
        if part.lists is None:
            return
        name, lists = f"{ASIDE}{self._task_pieces}", part.lists
        self._task_pieces += 1
        self.group.tell(
            name,
            call_with_block(Activity.SAMPLES, Session.attach_copy, name, lists.unload()),
            call(Activity.SAMPLES, Session.fill_aside, name, part.start, lists.data, lists.placements),
        )

    def end_task(self) -> None:
        """Hold nothing of the task any more."""
        self._forget_task_pieces()
        self.group.detach(ASIDE_BATCH)
        self.group.end_task()

    def _forget_task_pieces(self) -> None:
        for number in range(self._task_pieces):
            self.group.tell(f"{ASIDE}{number}")
        self._task_pieces = 0

    def keep(self, workers: int, world: int) -> None:
        """Have at most `workers` workers, of `world` in all."""
        self._ranks = self._ranks[:workers]
        self.group.resize(workers, self._ranks, world)

    def close(self) -> None:
        """End the workers."""
        self.group.close()
