"""The present step and the past: records that an engine replaces as a whole."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.plan import Plan
from batchopt_workers.batch.batch import Batch

# Returns the indices of a batch's samples in the data; None if unknown.
Indices = Callable[[], Sequence[int] | None]


class Step(NamedTuple):
    """One batch, and what lives as long as it is loaded. Random draws depend on its `number`; its terms count in f with
    `weights`. `chunk_size` None: the sizes of chunks follow the workers' speeds. `movable`: whether shares may change
    while the batch is evaluated; False if that would change f, or take more time than it saves. `deals`: whether
    workers may divide columns instead of samples.

    Of its last evaluation: the `losses` of the terms, and the `changes` of buffers that the module does not have yet.
    `ended`: the module has taken over changes; more evaluations start from the state before them. `drew`: they drew
    random numbers.
    """

    number: int
    batch: Batch
    weights: tuple[float, ...]
    chunk_size: int | None
    plan: Plan
    movable: bool
    rows: Indices
    deals: bool
    losses: tuple[float, ...] = ()
    changes: torch.Tensor | None = None
    ended: bool = False
    drew: bool = False


class Counters(NamedTuple):
    """`evaluations`; `batches` stepped on and their `samples`; `steps` begun (batches loaded), which number the random
    draws; the last `loss` and that of each term by name; the sha256 chain of all losses; and Hessian `products`.

    `paused`: the last step is to be gone on with, and until then batches that are loaded have its draws. `repeats`
    counts the evaluations with which such a rest began: those of a point that was evaluated before."""

    evaluations: int = 0
    batches: int = 0
    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    losses: str = ""
    terms: Mapping[str, float] = MappingProxyType({})
    products: int = 0
    paused: bool = False
    repeats: int = 0

    @property
    def position(self) -> int:
        """The number of evaluations, however often a step was paused."""
        return self.evaluations - self.repeats

    def evaluated(self, loss: float, terms: Mapping[str, float]) -> Counters:
        """Return the counters after an evaluation that found `loss`."""
        chain = hashlib.sha256(bytes.fromhex(self.losses) + struct.pack("<d", loss)).hexdigest()
        return Counters(self[0] + 1, *self[1:4], loss, chain, terms, *self[7:])

    def begun(self) -> Counters:
        """Return the counters after a batch was loaded, which begins a step unless one is paused."""
        return self if self.paused else Counters(*self[:3], self.steps + 1, *self[4:])  # type: ignore[arg-type]

    def stepped(self, samples: int, loss: float, terms: Mapping[str, float], paused: bool) -> Counters:
        """Return the counters after a step on a batch of `samples` that ended, or was `paused`, at this loss."""
        batches, samples = (self[1], self[2]) if paused else (self[1] + 1, self[2] + samples)
        return Counters(self[0], batches, samples, self[3], loss, self[5], terms, self[7], paused, self[9] + self[8])

    def fingerprint(self, parameters: torch.Tensor) -> str:
        """Return the sha256 of the chain, the counters and `parameters` (1-D)."""
        counters = struct.pack("<QQQ", self.evaluations, self.batches, self.samples)
        vector = parameters.detach().cpu().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(bytes.fromhex(self.losses) + counters + vector).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, a string and a dict of numbers; `Counters(**state).checked()` is the inverse."""
        return {**self._asdict(), "terms": dict(self.terms)}

    def checked(self) -> Counters:
        """Return the counters of a state, if they are some: raise `ValueError` or `TypeError` otherwise."""
        for name, default in Counters().state_dict().items():
            value = getattr(self, name)
            if type(value) is not type(default) or (type(value) is int and value < 0):
                raise ValueError(f"`history` of the state has {name} {value!r}, which is not a valid value")
        bytes.fromhex(self.losses)
        return self._replace(terms={name: float(loss) for name, loss in self.terms.items()})


class Found(NamedTuple):
    """The findings of an evaluation: f, and the loss of each term by name."""

    loss: float
    terms: Mapping[str, float]


class Past(NamedTuple):
    """The counters, and of the last evaluation the results of the posthook and, if kept, the module's `outputs`. A step
    that fails restores the record with which it began."""

    counters: Counters
    hook_results: list[Any]
    outputs: Any = None


class Rules(NamedTuple):
    """The way in which the present evaluations are made. `on_nonfinite`: as given by the user, or "keep": f may be NaN.
    `checks_cut`: the first batch that is cut is compared with its parts. `examines`: evaluations belong to no step, and
    change nothing in the module. `adapts`: policies may change how evaluations are made. `chunk_size`: in place of
    that of the settings."""

    on_nonfinite: str
    compresses: bool
    checks_cut: bool
    examines: bool = False
    adapts: bool = True
    chunk_size: int | None = None


# The rules of an examination: it leaves no trace in what is chosen, compared or left of gradients.
EXAMINED = {"checks_cut": False, "compresses": False, "adapts": False}
