"""The loaded batch with its plan, and the counters of all."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.plan import Plan, follow
from batchopt._mapreduce.speeds import Speeds
from batchopt_workers.data.batch import Batch


class Step(NamedTuple):
    """One batch. Random draws depend on its `number`; its terms count in f with `weights`. `chunk_size` None: the sizes
    of chunks follow the workers' speeds. `movable`: whether shares may change while the batch is evaluated; False if
    that would change f, or take more time than it saves."""

    number: int
    batch: Batch
    weights: tuple[float, ...]
    chunk_size: int | None
    plan: Plan
    movable: bool = True

    def followed(self, speeds: Speeds) -> Step:
        """Return the step for the next evaluation, with another plan if `speeds` make one noticeably faster."""
        plan = follow(self.plan, self.chunk_size, speeds) if self.movable else self.plan
        return self if plan is self.plan else self._replace(plan=plan)


@dataclass(frozen=True)
class Counters:
    """`evaluations`; `batches` stepped on and their `samples`; `steps` begun (batches loaded), which number the random
    draws; Hessian `products`; the last `loss` and that of each term by name; and the sha256 chain of all losses."""

    evaluations: int = 0
    batches: int = 0
    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    losses: str = ""
    terms: dict[str, float] = field(default_factory=dict)
    products: int = 0

    def evaluated(self, loss: float, terms: dict[str, float]) -> Counters:
        """Return the counters after an evaluation that found `loss`."""
        chain = hashlib.sha256(bytes.fromhex(self.losses) + struct.pack("<d", loss)).hexdigest()
        evaluations = self.evaluations + 1
        return Counters(evaluations, self.batches, self.samples, self.steps, loss, chain, terms, self.products)

    def begun(self) -> Counters:
        """Return the counters after a step has begun."""
        numbers = self.evaluations, self.batches, self.samples, self.steps + 1
        return Counters(*numbers, self.loss, self.losses, self.terms, self.products)

    def stepped(self, samples: int) -> Counters:
        """Return the counters after a step on a batch of `samples`."""
        numbers = self.evaluations, self.batches + 1, self.samples + samples, self.steps
        return Counters(*numbers, self.loss, self.losses, self.terms, self.products)

    def fingerprint(self, parameters: torch.Tensor) -> str:
        """Return the sha256 of the chain, the counters and `parameters` (1-D)."""
        counters = struct.pack("<QQQ", self.evaluations, self.batches, self.samples)
        vector = parameters.detach().cpu().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(bytes.fromhex(self.losses) + counters + vector).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and a string; `Counters(**state)` is the inverse."""
        return asdict(self)
