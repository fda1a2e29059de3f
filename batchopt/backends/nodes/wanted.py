"""One record of all that a node must have, compared with what each has. No input or output.

    want ─┬─ to_send(have, want) ──► fields, in their order ──► NodeSession.take ──► have
          └─ a new node has nothing, nor has one whose state is unknown or that failed to take a field

Values are compared by identity, which is fast and never mistaken: whoever changes a field makes a new value. It is the
idea of `batchopt.backends.process.wanted`, with values in place of calls: a node is in another process of this same
library, and makes the calls itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from batchopt.backends.lacking import lacking
from batchopt.backends.nodes.compression import Compression
from batchopt.backends.nodes.transfer import ProgramVersion, SentRows
from batchopt_workers.life.torch_settings import TorchSettings
from batchopt_workers.wire.layout import Layout
from batchopt_workers.wire.orders import Cut
from batchopt_workers.wire.packing import Packed


class NodeSetup(NamedTuple):
    """The settings of a node's workers for as long as they live; `precode` is pickled."""

    layout: Layout
    precode: bytes
    fixed_bits: bool
    timeout: float | None
    restarts: int
    threads: int
    devices: tuple[torch.device, ...] | None
    compression: Compression | None


class World(NamedTuple):
    """The ranks of a node's workers, among those of all nodes."""

    ranks: range
    workers: int


class NodeMode(NamedTuple):
    """The way in which a node's workers evaluate: whether hooks run, and whether the module's outputs are returned."""

    hooked: bool = True
    outputs: bool = False


class StepStart(NamedTuple):
    """The start of a step, with these weights of the terms; each step has an object of its own."""

    weights: tuple[float, ...]


class TaskStart(NamedTuple):
    """The current task, packed; `aside`: it is on a batch of its own."""

    packed: Packed
    aside: bool


class NodeWanted(NamedTuple):
    """All that a node must have. Fields are sent in this order: a field may need those before it."""

    setup: NodeSetup | None = None
    world: World | None = None
    torch: TorchSettings | None = None
    program: ProgramVersion | None = None  # the first one starts the workers
    mode: NodeMode | None = None
    rows: SentRows | None = None  # of the loaded batch
    step: StepStart | None = None
    cut: Cut | None = None
    task_rows: SentRows | None = None  # of the task's own batch, if it has one
    task: TaskStart | None = None
    task_cut: Cut | None = None


# With a field, these are dropped: they are sent again.
AFTER = {"program": ("step", "task"), "rows": ("step",), "step": ("task",), "task_rows": ("task",)}


def to_send(have: NodeWanted, want: NodeWanted) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a node lacks, each with what it is sent: of a program and of rows only what is new to
    it."""
    for name in lacking(have, want, AFTER):
        needs = getattr(want, name)
        yield name, needs.since(getattr(have, name)) if isinstance(needs, (ProgramVersion, SentRows)) else needs
