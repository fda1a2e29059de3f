"""The copies of the user's program and batch on which a worker evaluates, and fresh ones, to compare them with.

what was sent ─► a copy, over a private mapping of the memory ─► evaluations ─► one of the user's functions, or an
      │                                                             │           exception: thrown away
      └────────► a fresh one ─────────── the same? ─────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from batchopt_workers.batch.placing import Placing
from batchopt_workers.evaluate.audit import Copied, audit, check_parameters, few, last_samples
from batchopt_workers.evaluate.chunk import LoadedBatch
from batchopt_workers.evaluate.clock import Clock
from batchopt_workers.evaluate.evaluator import Evaluator
from batchopt_workers.evaluate.program import Program, Worker
from batchopt_workers.evaluate.state import ModuleState
from batchopt_workers.evaluate.sums import Rows
from batchopt_workers.evaluate.unwritten import constants
from batchopt_workers.functions.task import Evaluation
from batchopt_workers.life.blocks import Blocks
from batchopt_workers.life.device import Constants, Mirror, moved
from batchopt_workers.life.torch_settings import TorchSettings, leave_contexts, set_module_hooks
from batchopt_workers.shortcuts.form import Artifact
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.memory import SharedBlock
from batchopt_workers.wire.orders import Order
from batchopt_workers.wire.packing import Placement, assemble, own_classes, unpack, views


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


def parameters_of(layout: Layout, x: torch.Tensor) -> list[torch.nn.Parameter]:
    """Return new parameters that are views of X."""
    return [torch.nn.Parameter(view) for view in layout.views(x)]


class Copies:
    """The copies of a worker. `present`: that on which it evaluates, if a program was sent; `torch`: the settings and
    contexts of the parent; `clock`: of audits."""

    def __init__(self, worker: Worker, blocks: Blocks) -> None:
        self.worker, self._blocks = worker, blocks
        self.clock = Clock()
        self.torch: TorchSettings | None = None
        self.present: Copy | None = None
        self._sent: Sent | None = None
        self._artifacts: Sequence[Artifact] = ()

    def install(self, sent: Sent, vectors: Vectors) -> None:
        """Take another program, on parameters of X; calls that concern evaluations must be made again."""
        before, self._sent, self._artifacts, self.present = self.present, sent, (), None
        self.clock.restart()
        self.begin_anew(vectors)
        assert self.present is not None
        evaluator = self.present.evaluator
        if before is not None:
            evaluator.tasks.totals = before.evaluator.tasks.totals
            if evaluator.graphs is not None and before.evaluator.graphs is not None:
                evaluator.graphs.patience = 2 * before.evaluator.graphs.patience

    def compile(self, artifacts: Sequence[Artifact]) -> None:
        """Evaluate by these artifacts."""
        assert self.present is not None
        self._artifacts = artifacts
        self.present.evaluator.compile(artifacts, self.present.tensors)

    def begin_anew(self, vectors: Vectors) -> None:
        """Go on with a new copy of the program: the user's code may have left something in the present one, in the
        memory of batches, or among torch's modes and hooks of this process."""
        before = self.present
        self._blocks.discard()
        vectors.parameters = parameters_of(vectors.layout, vectors.x)  # those before may have been given other memory
        self.present = copy = self._copy(
            self.worker, vectors.parameters, self._blocks.private("program"), vectors.mirror
        )
        self._set_ambient(copy)
        if vectors.mirror is not None:
            vectors.mirror.adopt(copy.evaluator, copy.constants)
        if before is not None:
            copy.evaluator.adopt(before.evaluator)
            copy.evaluator.compile(self._artifacts, copy.tensors)

    def _copy(
        self, worker: Worker, parameters: Sequence[torch.nn.Parameter], block: SharedBlock, mirror: Mirror | None
    ) -> Copy:
        """Return a copy of the program as it was sent, in a mapping of its memory, as that of `worker`."""
        sent = self._sent
        assert sent is not None
        tensors, shared = views(sent.placements, block), views(sent.placements, self._blocks["program"])
        program: Program = assemble(sent.data, tensors, parameters)
        originals = {id(tensor): twin for tensor, twin in zip(tensors, shared, strict=True)}
        there: Constants = {}
        if mirror is not None:
            owners = program.module, program.criterion, *program.loss_fns
            there = moved(owners, worker.device, parameters, originals)
        worker.module, worker.criterion = program.module, program.criterion
        state = ModuleState(program.module, mirror is None, originals)
        read_only = constants((name, tensors[i]) for i, name in sent.read_only.items())
        evaluator = Evaluator(program, worker, parameters, state, read_only)
        if mirror is not None:
            evaluator.walk.place = Placing(worker.device)
        return Copy(evaluator, tensors, program.module_hooks, there)

    def audit(self, order: Order, name: str, held: Held, vectors: Vectors) -> None:
        """Compare the copies on which an order was carried out with fresh ones, of the batch in the memory of that
        `name`: see `audit`."""
        assert self.present is not None
        mine, own = self.present.evaluator, self.worker
        check_parameters(own.module, mine.parameters)
        samples, worker = last_samples(order, mine), Worker(own.rank, own.world_size, own.device)

        def used() -> Evaluation:
            return mine.eagerly(order.step, few(mine.loaded.batch, samples))

        def fresh() -> Evaluation:
            parameters = parameters_of(vectors.layout, vectors.x)
            with own_classes():
                copy = self._copy(worker, parameters, self._blocks.fresh("program"), vectors.mirror)
                batch = unpack(held.data, held.placements, self._blocks.fresh(name))
            copy.evaluator.loss.weights = mine.loss.weights
            self._set_ambient(copy)
            with self.contexts():
                return copy.evaluator.eagerly(order.step, few(batch, samples))

        try:
            audit(Copied(own, used), Copied(worker, fresh))
        finally:
            mine.walk.current = samples  # for an error

    def _set_ambient(self, copy: Copy) -> None:
        """Leave the modes of torch that the user's code has entered, and set those that were sent, and global hooks."""
        leave_contexts()
        if self.torch is not None:
            self.torch.apply()
        set_module_hooks(copy.module_hooks)

    def contexts(self) -> AbstractContextManager[Any]:
        """Return the contexts in which the parent evaluates."""
        return self.torch.contexts() if self.torch is not None and self.torch.has_contexts else nullcontext()
