"""The messages of the pipe between parent and worker, and the records of what the page says (`page`).

Parent to worker: `CALL` carries a pickled method of the worker's `Session` and its arguments (the parent trusts itself;
a descriptor that travels with it is the last one); `RING` says that there is an order on the page. Worker to parent:
`READY` with its `versions`, which have to be those of the parent; `RESULT` or `REFUSED`, one for each `CALL`. About an
order, by its number: `HOOKED` with what the posthook returned for a chunk, or `SILENT` with how often it returned None,
unless that is as the parent knows it; `FORM` with the result of a task for a chunk without its tensors, if that differs
from the form before in the evaluation; and `FAILED` with an exception. These are sent before the page says that there
is anything to read, or that the order is done.

Exceptions are UTF-8 text, of which nothing is unpickled; `RESULT`, `HOOKED` and `FORM` carry what functions of the user
returned there, pickled.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import torch


class Message(IntEnum):
    """The kind of a message."""

    CALL = 1
    RING = 2
    READY = 3
    RESULT = 4
    REFUSED = 5
    HOOKED = 6
    FORM = 7
    FAILED = 8
    SILENT = 9


# Replies that answer a call.
ANSWERS = frozenset({Message.READY, Message.RESULT, Message.REFUSED})
# The chunk of a HOOKED, a FORM or a SILENT, in which the number of Nones follows.
CHUNK = struct.Struct("!I")
NONES = struct.Struct("!II")


class Kind(IntEnum):
    """The work that is done with a chunk: f and its gradient, or a task whose results are collected or summed."""

    EVALUATE = 0
    COLLECT = 1
    TOTAL = 2


# Orders of tasks.
TASKS = frozenset({Kind.COLLECT, Kind.TOTAL})


class Order(NamedTuple):
    """Do this kind of work with chunks `first` up to `last` at the current X. `evaluation` numbers the evaluation, of
    which a worker may get several orders; `step` numbers the batch, for the random state."""

    evaluation: int
    step: int
    first: int
    last: int
    kind: Kind = Kind.EVALUATE


class Start(NamedTuple):
    """The state from which chunks are evaluated: the number of the batch in the workers' memory, and one that changes
    when a step begins, or its state at the start is another one."""

    batch: int = 0
    number: int = 0


@dataclass(frozen=True)
class Cut:
    """The cut of a batch: chunk `i` is samples `bounds[i]` up to `bounds[i + 1]`; the first bound is 0."""

    bounds: Sequence[int]

    @cached_property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.bounds) - 1


@lru_cache(maxsize=1)
def versions() -> str:
    """Return those of Python, torch, cloudpickle, and a hash of this package's current text."""
    text = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        text.update(path.read_bytes())
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, cloudpickle {cloudpickle.__version__}, "
        f"batchopt_workers {text.hexdigest()[:12]}"
    )
