"""The process backend: worker processes on this machine, over shared memory.

    parent (group.py)                       ║ process     worker (batchopt_workers.life.loop)
                                            ║ boundary
    CALL load(...), set_cut(...)  ── pipe ──╫──────────►  maps the blocks, cuts the batch
    order, limit    numbers of its page    ═╬═══════════  forward/backward at X, or a function of the user
    RING                          ── pipe ──╫──────────►  wakes it up
    X           block "parameters" ═════════╬═══════════  the module's parameters are views of it
    partials    block "rows", one each     ═╬═══════════  gradients are summed there
    rows, sums  files that grow ════════════╬═══════════  results of such a function
    reports         numbers of its page    ═╬═══════════  after each chunk
    results, errors  ◄── pipe ──────────────╫───────────  what is no number: results of hooks, forms, exceptions
    wake up     ◄── event, one for all ─────╫───────────  at the end of an order

Each worker has one private socket pair. Descriptors of later blocks travel over the same pair, so nothing ever listens.
What pages say, in which order, and why that suffices is in `batchopt_workers.wire.page`. This file has the memory of
batches; the workers are in `group`. Who evaluates what is decided in `scheduler`; processes are kept alive by `pool`,
as `roster` decides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from batchopt._data.arguments import read_parallelize
from batchopt._program.unpicklable import check_module, sending
from batchopt.backends.base import Backend, Prepared, Setup
from batchopt.backends.process.forkserver import anticipate, is_ready, libraries_of
from batchopt.backends.process.group import WorkerGroup
from batchopt.backends.process.shared_program import Ambient
from batchopt.backends.process.startup import check_workers, room_for
from batchopt.backends.process.wanted import Activity, SessionCall
from batchopt.backends.process.worker import call
from batchopt_workers.batch.batch import Batch
from batchopt_workers.functions.runner import of_term
from batchopt_workers.functions.task import Task
from batchopt_workers.life.session import ASIDE, Session, batch_name
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.packing import Packed, pack, unpack

# Largest memory in bytes that is kept from the batch of one task for that of the next.
KEPT = 2**28


@dataclass(frozen=True)
class PlacedBatch(Prepared):
    """A batch in shared memory, and the call by which a worker loads it. Batches of one `form` (None: of no such form)
    differ only in the elements of their tensors, of which `views` lie there; placed there they have one `key`."""

    slot: int
    memory: SharedBlock
    load: SessionCall
    form: object = None
    views: Sequence[torch.Tensor] = ()
    key: object = field(default_factory=object)


class ProcessBackend(WorkerGroup, Backend):
    """A group of worker processes with memory for the batches that they read."""

    local = compiles = True

    @classmethod
    def read_workers(cls, parallelize: Any) -> int | None:
        workers = read_parallelize(parallelize)
        if parallelize == "auto":
            return room_for(workers)
        if workers > 1:
            check_workers(workers)
        return workers

    @classmethod
    def check(cls, setup: Setup) -> None:
        if sys.platform != "linux":
            raise ValueError(f"worker processes need Linux, and this is {sys.platform}: use parallelize=1")
        if setup.flat.block is None:
            raise ValueError(
                f"parameters are on {setup.flat.vector.device}; workers run on cpu: call module.cpu(), and name other "
                "devices of the workers with devices=[...]; or use parallelize=1"
            )
        check_module(setup.program.module)

    @classmethod
    def anticipate(cls, setup: Setup) -> None:
        assert setup.workers is not None
        # precode comes before the imports of the program, some of which it may be for
        libraries = [] if setup.precode is not None else libraries_of(setup.program)
        anticipate(setup.workers, setup.threads, libraries)

    @classmethod
    def is_anticipated(cls) -> bool:
        return is_ready()

    def __init__(self, setup: Setup, ambient: Ambient | None = None) -> None:
        # Memory of two batches: workers read the one at `_slot`, and the other one is for the next batch.
        self._slots: list[SharedBlock | None] = [None, None]
        self._placed: list[PlacedBatch | None] = [None, None]
        self._slot = 0
        self._aside: SharedBlock | None = None  # for the batch of a task
        self._loaded = Batch(())
        self._parameters = setup.parameters
        super().__init__(setup, ambient)

    def prepare(self, batch: Batch, ahead: bool = False) -> Prepared:
        slot, in_use = self._slot_for(ahead)
        before, plain = self._placed[slot], batch.plain
        if before is not None and plain is not None and plain.form == before.form and not in_use:
            for view, tensor in zip(before.views, plain.tensors, strict=True):
                view.copy_(tensor)
            return PlacedBatch(batch, slot, before.memory, before.load, before.form, before.views, before.key)
        with sending("the batch", batch):
            packed = pack(batch)
        return self._place(batch, packed, slot, in_use)

    def place(self, packed: Packed) -> Prepared:
        """Place a batch that another machine has packed; its tensors lie in memory that the workers read."""
        placed = self._place(Batch(()), packed, *self._slot_for(ahead=False))
        return replace(placed, batch=unpack(packed.data, packed.placements, placed.memory))

    def give_back(self) -> None:
        """Release the memory reserved for the next batch."""
        spare = 1 - self._slot
        self._slots[spare] = self._placed[spare] = None
        self.detach(batch_name(spare))

    def _slot_for(self, ahead: bool) -> tuple[int, bool]:
        """Return where the next batch goes, and whether the memory there is in use: a late worker may read it."""
        # A worker reads the present batch only while it evaluates.
        slot = 1 - self._slot if ahead or not self.is_free else self._slot
        return slot, slot != self._slot and self.is_reading(slot)

    def _place(self, batch: Batch, packed: Packed, slot: int, in_use: bool) -> PlacedBatch:
        memory, plain = self._slots[slot], batch.plain
        if memory is None or packed.nbytes > memory.nbytes or in_use:
            memory = self._slots[slot] = SharedBlock.create(packed.nbytes)
        views = packed.place(memory)
        load = call(Activity.BATCH, Session.load, batch_name(slot), packed.data, packed.placements)
        placed = PlacedBatch(batch, slot, memory, load, plain and plain.form, views if plain is not None else ())
        self._placed[slot] = replace(placed, batch=Batch(()))  # the user's tensors are not kept
        return placed

    def load(self, prepared: Prepared, weights: tuple[float, ...]) -> None:
        assert isinstance(prepared, PlacedBatch)
        self.begin_step(prepared.batch, prepared.slot, weights)
        self._slot, self._loaded = prepared.slot, prepared.batch
        self.attach(batch_name(prepared.slot), prepared.key, prepared.memory, prepared.load)

    def begin_task(self, task: Task, batch: Batch | None, follow: bool) -> bool:
        with sending("the function", task.function):
            packed = pack(task, self._parameters)
        calls = [] if batch is None else self._place_aside(batch)
        changed = follow and self.follow()
        subject = batch or of_term(self._loaded, task.term)
        self.send_task(task, packed, calls, subject)
        return changed

    def _place_aside(self, batch: Batch) -> list[SessionCall]:
        """Copy the batch of a task to shared memory; return the calls by which a worker loads it."""
        with sending("the batch", batch):
            packed = pack(batch)
        memory = self._aside
        if memory is None or packed.nbytes > memory.nbytes or not self.is_free:
            memory = SharedBlock.create(packed.nbytes)
        self._aside = memory if memory.nbytes <= KEPT else None
        packed.place(memory)
        self.attach(ASIDE, memory, memory)
        return [call(Activity.BATCH, Session.load_aside, ASIDE, packed.data, packed.placements)]

    def end_task(self) -> None:
        if self._aside is None:
            self.detach(ASIDE)
        super().end_task()

    def close(self) -> None:
        super().close()
        self._slots, self._aside, self._loaded = [None, None], None, Batch(())
        self._placed = [None, None]
