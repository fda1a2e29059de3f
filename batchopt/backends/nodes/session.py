"""The state of a node: the part that it has of the parent's program, its worker processes, and what they work on.

The parent sends fields of `NodeWanted`, in their order; for each there is a method here that takes it. What is taken
twice replaces what was there. Nothing is kept of a field that could not be taken: the parent sends everything again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchopt._program.flatten import Flat
from batchopt.backends.base import Mode, Prepared, Setup
from batchopt.backends.nodes.transfer import ProgramUpdate, RowsUpdate, made, unpacked
from batchopt.backends.nodes.wanted import NodeMode, NodeSetup, StepStart, TaskStart, World
from batchopt.backends.nodes.wire import Wire, wire_of
from batchopt.backends.process.backend import ProcessBackend
from batchopt.backends.process.shared_program import Ambient
from batchopt_workers.batch.batch import Batch
from batchopt_workers.evaluate.program import Program
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.packing import assemble, dumps


class NodeSession:
    """The workers of this machine, once there is a program, and X. Attributes are set by the fields that are taken."""

    flat: Flat  # X
    wire: Wire | None = None
    _setup: NodeSetup
    _parameters: list[torch.nn.Parameter]
    _world: World
    _torch: TorchSettings
    _sent: tuple[Program, list[torch.Tensor]]  # the program, and its tensors

    def __init__(self) -> None:
        self.workers: ProcessBackend | None = None
        self.cuts = {False: Cut((0,)), True: Cut((0,))}  # of the batch, and of the task's
        self._batch = Prepared(Batch(()))  # of the step, with the rows that are here
        self._aside: Batch | None = None  # the task's own

    def take(self, name: str, value: Any) -> None:
        """Take a field of what this node must have."""
        getattr(self, f"_take_{name}")(value)

    @property
    def _started(self) -> ProcessBackend:
        if self.workers is None:
            raise RuntimeError("the workers of this node were not started")
        return self.workers

    def _take_setup(self, setup: NodeSetup) -> None:
        self.close()  # workers of a start whose answer was not received, because another node was lost
        self.workers = None
        block = SharedBlock.create(setup.layout.size * setup.layout.dtype.itemsize)
        self.flat = Flat(setup.layout, block.tensor(setup.layout.dtype, (setup.layout.size,)), block)
        self._parameters = [torch.nn.Parameter(view) for view in setup.layout.views(self.flat.vector)]
        self._setup = setup

    def _take_world(self, world: World) -> None:
        self._world = world
        if self.workers is not None:
            self.workers.resize(len(world.ranks), tuple(world.ranks), world.workers)

    def _take_torch(self, settings: TorchSettings) -> None:
        settings.apply()
        self._torch = settings

    def _take_program(self, update: ProgramUpdate) -> None:
        """Start the workers of a program, or have them take over another version of it with the next step."""
        if update.data is None:
            update.write(self._sent[1])
            return
        tensors = made(update.placements, update.elements.values())
        program = assemble(update.data, tensors, self._parameters)
        self._sent = program, tensors
        buffers = ModuleState(program.module)
        if self.workers is None:
            self._start(buffers)
        else:
            self.workers.replace_program(program, buffers)

    def _start(self, buffers: ModuleState) -> None:
        setup, world = self._setup, self._world
        found = Setup(
            workers=len(world.ranks),
            fixed_bits=setup.fixed_bits,
            timeout=setup.timeout,
            restarts=setup.restarts,
            threads=setup.threads,
            devices=setup.devices,
            precode=pickle.loads(setup.precode),
            program=self._sent[0],
            flat=self.flat,
            parameters=self._parameters,
            buffers=buffers,
            compression=setup.compression,
            ranks=tuple(world.ranks),
            world=world.workers,
        )
        self.wire = wire_of(found)
        self.workers = ProcessBackend(found, Ambient(lambda: self._torch, lambda: self._sent[0].module_hooks))

    def _take_mode(self, mode: NodeMode) -> None:
        program = self._sent[0]
        self._started.set_mode(Mode(program.prehook, program.posthook, mode.hooked, mode.outputs))

    def _take_rows(self, rows: RowsUpdate) -> None:
        if rows.is_more:
            # The others are read from the workers' memory, so the batch with both is placed in another block.
            self._batch = self._started.prepare(rows.added_to(self._batch.batch), ahead=True)
        else:
            self._batch = self._started.place(rows.packed)

    def _take_step(self, start: StepStart) -> None:
        self._started.load(self._batch, start.weights)
        self._started.give_back()  # the other block, if rows were added

    def _take_cut(self, cut: Cut) -> None:
        self.cuts[False] = cut

    def _take_task_rows(self, rows: RowsUpdate | None) -> None:
        if rows is None:
            self._aside = None
        elif rows.is_more and self._aside is not None:
            self._aside = rows.added_to(self._aside)
        else:
            self._aside = unpacked(rows.packed)

    def _take_task(self, task: TaskStart | None) -> None:
        if task is None:
            self._started.end_task()
        else:
            aside = self._aside if task.aside else None
            self._started.begin_task(unpacked(task.packed, self._parameters), aside, follow=True)

    def _take_task_cut(self, cut: Cut) -> None:
        self.cuts[True] = cut

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[bytes]:
        """Call a function in each worker; return the values, pickled."""
        return [dumps(value) for value in self._started.run(function, arguments)]

    def close(self) -> None:
        """End the workers."""
        if self.workers is not None:
            self.workers.close()
