"""The plan of an evaluation: how the batch is cut into chunks, and which shard each worker gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from batchopt._mapreduce.speeds import Speeds
from batchopt._mapreduce.split import runs, split_batch
from batchopt_workers.process.messages import Cut, Kind, Order


@dataclass(frozen=True)
class Plan:
    """A cut of the batch, and the number of chunks in each worker's shard; `age` counts the evaluations that used it,
    as long as it is new."""

    cut: Cut
    shares: tuple[int, ...]
    age: int = 0

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The first chunk of each worker's shard, and the one behind its last."""
        return runs(self.shares)

    def orders(self, evaluation: int, step: int, kind: Kind = Kind.EVALUATE) -> list[Order | None]:
        """Each worker's order of that kind; None for a worker without a share."""
        return [Order(evaluation, step, first, last, kind) if last > first else None for first, last in self.runs]

    def samples(self) -> list[int]:
        """Each worker's number of samples."""
        bounds = self.cut.bounds
        return [bounds[last] - bounds[first] for first, last in self.runs]


# A plan is replaced if another one is expected to save more than WORTHWHILE of an evaluation; a plan younger than NEW
# evaluations only for a gain above MUCH, since few measurements back it.
WORTHWHILE, MUCH = 0.02, 0.1
# Evaluations for which a plan is new.
NEW = 4
# How many chunks a batch is cut into where the caller wants the same bits always, and gives no chunk size.
DETERMINISTIC_CHUNKS = 32


def choose_chunk_size(size: int, given: int | None, deterministic: bool) -> int | None:
    """The chunk size for a batch of `size` samples: of the data alone, or None if chunks need not be fixed."""
    if given is None and deterministic:
        return -(-size // DETERMINISTIC_CHUNKS)
    return given


def make_plan(size: int, chunk_size: int | None, speeds: Speeds) -> Plan:
    """How to evaluate `size` samples: without a chunk size each worker gets one chunk, as large as its speed allows;
    else a run of the chunks that the size fixes."""
    if chunk_size is None:
        counts = split_batch(size, speeds.relative)
        bounds = [0, *accumulate(count for count in counts if count)]
        shares = [1 if count else 0 for count in counts]
    else:
        bounds = [*range(0, size, chunk_size), size]
        shares = split_batch(len(bounds) - 1, speeds.relative)
    return Plan(Cut(tuple(bounds)), tuple(shares))


def plan_of(cut: Cut, speeds: Speeds) -> Plan:
    """How to evaluate a batch that is cut so."""
    return Plan(cut, tuple(split_batch(cut.chunks, speeds.relative)))


def follow(plan: Plan, chunk_size: int | None, speeds: Speeds) -> Plan:
    """The plan for the next evaluation: the same, unless the measured speeds make another one noticeably faster.

    Fixed chunks stay as they are, and only change hands: what whole chunks cannot save counts for nothing.
    """
    if speeds.fixed or len(plan.shares) == 1:
        return plan
    samples = plan.samples()
    limit = (1 - (MUCH if plan.age < NEW else WORTHWHILE)) * speeds.makespan(samples)
    if speeds.shortest(sum(samples)) < limit:
        other = make_plan(sum(samples), None, speeds) if chunk_size is None else plan_of(plan.cut, speeds)
        if speeds.makespan(other.samples()) < limit:
            return other
    return plan if plan.age >= NEW else replace(plan, age=plan.age + 1)
