"""The messages between parent and worker.

Parent to worker: `CALL` carries a pickled function and its arguments (the parent trusts itself; descriptors of shared
memory follow it); `EVALUATE`, `MULTIPLY`, `COLLECT` and `TOTAL` carry an `Order`, 37 bytes in all; `LIMIT` shortens the
order with the same number. Worker to parent: fixed binary frames and UTF-8 text (`READY`, `REPORT`, `DONE`, `FAILED`),
of which nothing is unpickled; `RESULT`, `HOOKED` and `FORM` carry what functions of the user returned there, pickled.

Each `CALL` and order is answered by one `RESULT`, `DONE` or `FAILED`; a `LIMIT` is not answered. The `DONE` of an order
is preceded by a `REPORT` for each chunk but the last, a `HOOKED` for each chunk with a posthook, and a `FORM` for each
chunk of a task: its result without the tensors. Both sides must have the same `versions`.
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

from batchopt_workers.map.tree import Node

# Every message begins with its number (a reply with that of the message it answers) and its kind.
HEAD = struct.Struct("!QB")


class Kind(IntEnum):
    """The kind of a message."""

    CALL = 1
    EVALUATE = 2
    READY = 3
    DONE = 4
    RESULT = 5
    FAILED = 6
    HOOKED = 7
    REPORT = 8
    LIMIT = 9
    MULTIPLY = 10
    COLLECT = 11
    TOTAL = 12
    FORM = 13


# Orders of tasks.
TASKS = frozenset({Kind.COLLECT, Kind.TOTAL})
# Kinds that carry an `Order`.
ORDERS = frozenset({Kind.EVALUATE, Kind.MULTIPLY}) | TASKS
# Replies that end the work on a message.
ANSWERS = frozenset({Kind.READY, Kind.DONE, Kind.RESULT, Kind.FAILED})
# The new end of a LIMIT; the chunk of a HOOKED or a FORM.
CHUNK = struct.Struct("!I")
_ORDER = struct.Struct("<QQII")
_REPORT = struct.Struct("<QIddIII?")
_SUMMARY = struct.Struct("<III")  # and the losses as doubles, and a byte for each parameter


class Order(NamedTuple):
    """Evaluate chunks `first` up to `last` at the current X: f and its gradient (`EVALUATE`), the Hessian times the
    current direction (`MULTIPLY`), or the current task (`COLLECT`, `TOTAL`). `evaluation` numbers the evaluation, of
    which a worker may get several orders; `step` numbers the batch, for the random state."""

    evaluation: int
    step: int
    first: int
    last: int
    kind: Kind = Kind.EVALUATE

    @property
    def is_quiet(self) -> bool:
        """Tell whether the parent does not wait for the messages before the end: reports of chunks, which matter only
        if something fails or another worker runs out of work, and the answers to the calls that begin a task."""
        return self.last - self.first > 1 or self.kind in TASKS

    def encode(self) -> bytes:
        """Return the frame after its kind byte."""
        return _ORDER.pack(self.evaluation, self.step, self.first, self.last)

    @classmethod
    def decode(cls, frame: bytes, kind: Kind = Kind.EVALUATE) -> Order:
        """Invert `encode`, for a frame after this kind byte."""
        evaluation, step, first, last = _ORDER.unpack(frame)
        return cls(evaluation, step, first, last, kind)


class Summary(NamedTuple):
    """The result of a merged run of chunks besides its gradient: its place in the tree, the row of the worker's
    gradients that holds the sum, the loss sum of each term, and a byte for each parameter that tells whether any chunk
    had a gradient for it."""

    node: Node
    row: int
    losses: tuple[float, ...]
    used: bytes


class Report(NamedTuple):
    """The state of a worker after a chunk of an `Order`: the chunks before `next` are done, in `seconds` since the
    order came, at `began` on the worker's `time.perf_counter`; `summaries` are all its merged partials of this
    evaluation, including those of earlier orders. They are valid until the next report: a row that is no longer named
    may be overwritten. `drew`: whether a forward of this step was seen to draw random numbers."""

    evaluation: int
    next: int
    seconds: float
    summaries: tuple[Summary, ...]
    began: float = 0.0
    drew: bool = False

    def encode(self) -> bytes:
        """Return the frame after its kind byte."""
        terms, width = (len(self.summaries[0].losses), len(self.summaries[0].used)) if self.summaries else (0, 0)
        count = len(self.summaries)
        parts = [_REPORT.pack(self.evaluation, self.next, self.seconds, self.began, count, terms, width, self.drew)]
        for s in self.summaries:
            parts += (
                _SUMMARY.pack(s.node.level, s.node.position, s.row),
                struct.pack(f"<{terms}d", *s.losses),
                s.used,
            )
        return b"".join(parts)

    @classmethod
    def decode(cls, frame: bytes) -> Report:
        """Invert `encode`; raise `ValueError` for any other frame."""
        try:
            evaluation, done, seconds, began, count, terms, width, drew = _REPORT.unpack_from(frame)
            stride = _SUMMARY.size + 8 * terms + width
            if len(frame) != _REPORT.size + count * stride:
                raise ValueError(f"a frame of {len(frame)} bytes for {count} partials of {stride}")
            return cls(evaluation, done, seconds, tuple(cls._summaries(frame, stride, terms)), began, drew)
        except struct.error as error:
            raise ValueError(f"not a frame: {error}") from error

    @classmethod
    def _summaries(cls, frame: bytes, stride: int, terms: int) -> list[Summary]:
        found = []
        for offset in range(_REPORT.size, len(frame), stride):
            level, index, row = _SUMMARY.unpack_from(frame, offset)
            losses = struct.unpack_from(f"<{terms}d", frame, offset + _SUMMARY.size)
            used = frame[offset + _SUMMARY.size + 8 * terms : offset + stride]
            found.append(Summary(Node(level, index), row, losses, used))
        return found


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
