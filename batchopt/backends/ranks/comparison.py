"""The calls that ranks must make alike: a description of each call, which they compare before anything comes of it.

    this rank: call, its number, X, batch ...  ─┐
                                                ├─ equal: continue; else: NodesDifferError names what differs
    other ranks: the same of theirs            ─┘

X is never sent: without this, ranks would diverge unnoticed. Long values are compared by a digest. Programs are
compared by what they find: f and df/dX of the last samples of the batch, at evaluations 1, 2, 4, 8, ..., and at each
64th, since a change on one rank alone may come at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from batchopt._machine.cores import torch_threads
from batchopt._program.checksum import checksum
from batchopt._program.copies import evaluator_of_copy
from batchopt.backends.base import Run, Setup
from batchopt.backends.nodes.group import Group
from batchopt.backends.nodes.result import Call
from batchopt_workers.batch.batch import Batch
from batchopt_workers.batch.items import Items
from batchopt_workers.evaluate.audit import few
from batchopt_workers.evaluate.draws import draws_kept
from batchopt_workers.functions.inspection import written
from batchopt_workers.wire.failures import let_through
from batchopt_workers.wire.orders import Cut, Kind, Order, versions
from batchopt_workers.wire.structures import tensors_in

# The key of what a program finds.
PROGRAM = "f of the last samples and |df/dX|"
# Evaluations after which the programs are compared at the latest.
OFTEN = 64
# Attributes that are named in an error.
NAMED = 3


class CallComparison:
    """Describes the calls of this rank of `group`, and compares them with those of the others."""

    def __init__(self, setup: Setup, group: Group) -> None:
        self._setup, self._group, self._numbers = setup, group, count(1)
        self._digests: dict[str, Any] = {}  # of the batch, and of what comes with it
        self._batch: Batch | None = None
        self._evaluations = 0
        self._attributes: dict[str, str] = {}  # of the program that was compared last, by name

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
        found: dict[str, Any] = {}
        if order.kind is Kind.EVALUATE:
            self._evaluations += 1
            if self._evaluations & (self._evaluations - 1) == 0 or self._evaluations % OFTEN == 0:
                found[PROGRAM] = self._found(order.step)
        return self.call(
            order.kind.name.lower(),
            evaluation=order.evaluation,
            step=order.step,
            X=checksum([self._setup.flat.vector]),
            chunks=tuple(cut.bounds) if cut.chunks < 8 else f"{cut.chunks} ({hash(tuple(cut.bounds)) % 2**32:08x})",
            shares=[last - first for first, last in runs],
            **self._digests,
            **found,
        )

    def load(self, batch: Batch, weights: tuple[float, ...]) -> None:
        """Take over a batch."""
        self._batch = batch
        self._digests = {"batch": of_batch(batch), "weights of terms": weights}

    def begin_task(self, batch: Batch | None) -> None:
        """Take over the batch of a task."""
        self._digests["batch of the task"] = None if batch is None else of_batch(batch)

    def _found(self, step: int) -> list[float] | None:
        """Return the losses of the last samples of the batch, and the size of df/dX there, as a copy of the program
        finds them; None if it cannot be copied, or not evaluated by so few samples."""
        setup, batch = self._setup, self._batch
        assert batch is not None
        try:
            copy = evaluator_of_copy(setup.program, setup.flat, setup.parameters)
            self._attributes = written(copy.worker)
            with torch.inference_mode(False), draws_kept(), torch_threads(setup.threads):
                losses, gradient, *_ = copy.eagerly(step, few(batch, range(batch.size)))
        except Exception as error:  # which is raised again where it counts
            let_through(error)
            return None
        return [*losses, float(gradient.double().norm())]

    def differences(self, calls: Sequence[Call | None]) -> str:
        """Describe in what the ranks' calls differ, and whose; empty if they do not."""
        whole = [call or {} for call in calls]
        if not _agree([call.get(PROGRAM) for call in whole], torch.finfo(self._setup.flat.vector.dtype).eps ** 0.5):
            whole = [{**call, **of} for call, of in zip(whole, self._differing(), strict=True)]
        else:
            whole = [{**call, PROGRAM: None} for call in whole]
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

    def _differing(self) -> list[dict[str, str]]:
        """Return the first attributes and buffers in which the programs differ, of each rank: a digest."""
        of_all: list[dict[str, str]] = self._group.exchange(self._attributes)
        names = [name for name in of_all[0] if any(one.get(name) != of_all[0][name] for one in of_all)]
        return [{f"'{name}'": one.get(name, "missing")[:8] for name in names[:NAMED]} for one in of_all]


def _agree(found: Sequence[list[float] | None], part: float) -> bool:
    """Tell whether ranks have found the same numbers, but for rounding, which differs between machines."""
    known = [numbers for numbers in found if numbers is not None]
    if len(known) < len(found):
        return not known
    for of_all in zip(*known, strict=True):
        if not math.isclose(min(of_all), max(of_all), rel_tol=part) and not all(map(math.isnan, of_all)):
            return False
    return True


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
