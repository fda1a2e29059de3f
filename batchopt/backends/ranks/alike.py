"""The calls that ranks must make alike: a description of each call, which they compare before anything comes of it.

    this rank: call, its number, X, batch, program ...  ─┐
                                                         ├─ equal: continue; else: NodesDifferError names what differs
    other ranks: the same of theirs                     ─┘

X is never sent: without this, ranks would diverge unnoticed. Long values are compared by a digest; only if those of the
program differ are its parts exchanged. Parts that forwards write are ignored from then on: they depend on the share of
a rank, and f does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from batchopt._program.description import ComparedProgram, checksum
from batchopt.backends.base import Run, Setup
from batchopt.backends.nodes.group import Group
from batchopt.backends.nodes.result import Call
from batchopt_workers.data.batch import Batch
from batchopt_workers.data.items import Items
from batchopt_workers.data.structures import tensors_in
from batchopt_workers.process.messages import Cut, Order, versions


class Alike:
    """Describes the calls of this rank of `group`, and compares them with those of the others."""

    def __init__(self, setup: Setup, group: Group) -> None:
        self._setup, self._group, self._numbers = setup, group, count(1)
        self._digests: dict[str, Any] = {}  # of the batch, and of what comes with it
        self._state: tuple[Any, str] | None = None  # where the tensors outside X are, and their checksum
        self._program, self._looks = ComparedProgram(setup.program), False

    def call(self, name: str, **others: Any) -> dict[str, Any]:
        """Describe a call."""
        return {"call": name, "which is its number": next(self._numbers), **others}

    def start(self) -> dict[str, Any]:
        """Describe the start of an optimizer, or of other numbers of workers."""
        setup, layout = self._setup, self._setup.flat.layout
        found = self.call("BatchOptimizer(...) or resize()", versions=versions())
        found |= {"parameters": (layout.size, str(layout.dtype)), "seed": setup.program.seed}
        return found | {"fixed chunks": setup.fixed_bits}

    def evaluation(self, cut: Cut, order: Order, runs: Sequence[Run]) -> dict[str, Any]:
        """Describe an evaluation."""
        return self.call(
            order.kind.name.lower(),
            evaluation=order.evaluation,
            step=order.step,
            X=checksum([self._setup.flat.vector]),
            chunks=tuple(cut.bounds) if cut.chunks < 8 else f"{cut.chunks} ({hash(tuple(cut.bounds)) % 2**32:08x})",
            shares=[last - first for first, last in runs],
            program=self._program.digest,
            **self._digests,
        )

    def load(self, batch: Batch, weights: tuple[float, ...]) -> None:
        """Take over a batch, and the user's changes of the program."""
        self._digests = {"batch": of_batch(batch), "frozen parameters and buffers": self._state_digest()}
        self.resync()
        self._digests |= {"weights of terms": weights}

    def begin_task(self, batch: Batch | None, follow: bool) -> None:
        """Take over the batch of a task, and, to `follow` them, the user's changes of the program."""
        self._digests["batch of the task"] = None if batch is None else of_batch(batch)
        if follow:
            self.resync()

    def resync(self) -> None:
        """Take over the user's changes of the program."""
        self._program.resync()
        self._looks = True

    def learn(self, ran_here: bool) -> None:
        """Learn what forwards write in the user's own module, if they `ran_here`; once a step."""
        if self._looks and ran_here:
            self._program.learn()
        self._looks = False

    def _state_digest(self) -> str:
        """Return a checksum of the tensors outside X; computed again after they were written, or if one is sparse."""
        tensors = self._program.tensors(self._setup.parameters)
        dense = [tensor if tensor.layout is torch.strided else tensor.detach().to_dense() for tensor in tensors]
        marks = [
            (own.data_ptr() if own is tensor else object(), own._version)
            for own, tensor in zip(dense, tensors, strict=True)
        ]
        if self._state is None or self._state[0] != marks:
            self._state = marks, checksum(dense)
        return self._state[1]

    def differences(self, calls: Sequence[Call | None]) -> str:
        """Describe in what the ranks' calls differ, and whose; empty if they do not."""
        whole = [call or {} for call in calls]
        if any(call.get("program") != whole[0].get("program") for call in whole):
            parts = self._program.differing(self._group.exchange(self._program.in_full))
            whole = [{**call, "program": None, **of} for call, of in zip(whole, parts, strict=True)]
        texts = []
        for key in dict.fromkeys(key for call in whole for key in call):
            names: dict[str, list[str]] = {}  # of the ranks, by value
            for name, call in zip(self._group.names, whole, strict=True):
                names.setdefault(str(call.get(key)), []).append(name)
            if len(names) > 1:
                texts.append(f"{key} " + ", ".join(f"{value} on {' and '.join(of)}" for value, of in names.items()))
                if key == "call":
                    break  # later differences follow from this one
        return "; ".join(texts)


def of_batch(batch: Batch) -> str:
    """Describe a batch: the number of samples, and a checksum of all tensors; of a dataset the name of its class."""
    tensors: list[torch.Tensor] = []
    names = []
    for part in batch.parts:
        tensors += part.criterion_rows.values()
        for data in (part.inputs, part.targets):
            if isinstance(data, Items):
                names.append(type(data.data).__name__)
            elif data is not None:
                tensors += tensors_in(data.data)
    return f"of {batch.size} samples ({' '.join([*names, checksum(tensors)])})"
