"""The loaded batch with its plan, the evaluation that can be repeated, and the counters of all."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.answers import Answer, Span
from batchopt._mapreduce.plan import Plan, follow
from batchopt._mapreduce.reduce import Reduction
from batchopt._mapreduce.speeds import Speeds
from batchopt.backends.base import LONGEST as LONGEST
from batchopt.backends.base import Repeated, WorkerInfo
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


# Evaluations after which one is ordered regardless: its times are measurements, by which shares may change.
MOST = 32
# A worker is to be given less if it takes this many times the average, plus this many seconds.
UNEVEN, NOTICEABLE = 1.25, 2e-3


class Repeat:
    """An evaluation of `step` that the backend can repeat, known to it as `which`: in this step, and in those that
    follow as long as their batches are cut and shared out alike."""

    def __init__(
        self, step: Step, speeds: Speeds, which: object, answers: Sequence[Answer], infos: Sequence[WorkerInfo]
    ) -> None:
        """`speeds`: as last measured; `infos`: of all workers."""
        self.which, self._speeds, self.step = which, speeds, step.number
        self._cut, self._shares, self._terms = step.plan.cut, step.plan.shares, len(step.weights)
        self.reduction = Reduction(answers, step.plan.cut.chunks)
        self._workers = [(infos[answer.rank], answer.samples) for answer in answers]
        found = (of_chunk for answer in answers for of_chunk in answer.results.values())
        self.hook_results = [*chain.from_iterable(found)]  # nothing but None
        self.drew = any(answer.drew for answer in answers)  # random numbers
        self.seconds = max(answer.seconds for answer in answers)
        self._answers = answers
        self._left = MOST

    def fits(self, step: Step, speeds: Speeds) -> bool:
        """Tell whether an evaluation of this step has the same chunks, also with these speeds."""
        plan = step.plan
        alike = plan.cut is self._cut and plan.shares == self._shares and len(step.weights) == self._terms
        return alike and speeds is self._speeds

    def took(self, times: Sequence[Sequence[float]]) -> bool:
        """Count a repetition with these times (start, seconds) per worker; return whether another one may follow."""
        longest = total = 0.0
        for (worker, samples), (_, seconds) in zip(self._workers, times, strict=True):
            worker.samples += samples
            worker.busy_seconds += seconds
            total += seconds
            longest = max(longest, seconds)
        self.seconds = longest
        self._left -= 1
        return self._left > 0 and longest < LONGEST and longest < UNEVEN * total / len(times) + NOTICEABLE

    def answers(self, found: Repeated) -> list[Answer]:
        """Return the answers that the workers would have sent, for observers."""
        return [
            replace(answer, seconds=took, spans=[Span(began, took, answer.spans[0].first, answer.spans[0].last)])
            for answer, (began, took) in zip(self._answers, found.times, strict=True)
        ]


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
