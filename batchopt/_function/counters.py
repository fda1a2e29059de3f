"""Counters of evaluations, batches and samples, the last loss, and a digest of all losses."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


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
