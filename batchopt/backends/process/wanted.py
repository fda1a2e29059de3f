"""One record of all that a worker process must have, compared with what each has. No input or output.

    want ─┬─ lacking(have, want) ──► calls, in the order of the fields ──► have
          └─ a new worker has nothing; a worker that refuses a field has all but that

A change of a field is one assignment of the record. So an interrupt leaves either the one or the other, and whoever
looks at it next makes up for what was not sent.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from batchopt_workers.wire.packets import HasDescriptor


class Activity(Enum):
    """The activities of a worker, in the words of error messages."""

    STARTING = "starting"
    PRECODE = "running precode"
    INSTALLING = "receiving the module"
    HOOKS = "receiving hooks"
    TORCH = "receiving torch's settings"
    COMPILED = "receiving compiled evaluations"
    BATCH = "receiving the batch"
    TASK = "receiving the function"
    CUT = "receiving the cut"
    MEMORY = "receiving memory"
    EVALUATING = "evaluating"
    FUNCTION = "running a function"


class SessionCall(NamedTuple):
    """A pickled call of a method of the worker's `Session`, and the block or file whose descriptor travels with it."""

    activity: Activity
    body: bytes
    block: HasDescriptor | None = None


class Field(NamedTuple):
    """The calls by which a worker gets a field, and the value that they were made of."""

    calls: tuple[SessionCall, ...] = ()
    value: object = None


# A worker has no more of a field than its calls made; this one is empty.
NOTHING = Field()


class Wanted(NamedTuple):
    """All that a worker must have. Fields are sent in this order: a field may need those before it."""

    process: Field = NOTHING
    devices: Field = NOTHING
    torch: Field = NOTHING
    precode: Field = NOTHING
    parameters: Field = NOTHING
    world: Field = NOTHING
    memory: Field = NOTHING  # of the module's tensors
    module: Field = NOTHING
    hooked: Field = NOTHING
    compiled: Field = NOTHING
    weights: Field = NOTHING
    batch_0: Field = NOTHING
    batch_1: Field = NOTHING
    cut: Field = NOTHING
    file_0: Field = NOTHING
    file_1: Field = NOTHING
    outputs: Field = NOTHING
    aside: Field = NOTHING  # the memory of the batch of a task
    task: Field = NOTHING
    task_cut: Field = NOTHING


# With a field, these are dropped: they are sent again.
AFTER = {"module": ("hooked", "compiled", "weights", "batch_0", "batch_1", "cut", "outputs", "task", "task_cut")}


def having(have: Wanted, name: str, field: Field) -> Wanted:
    """Return what a worker has once it was sent a field."""
    changed: dict[str, Any] = {name: field, **dict.fromkeys(AFTER.get(name, ()), NOTHING)}
    return have._replace(**changed)
