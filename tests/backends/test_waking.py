"""Nobody wakes the parent up for the report of a chunk, and it hears whoever has something to say."""

from __future__ import annotations

from typing import Any

import pytest

from batchopt import BatchOptimizer, Sample, Worker
from batchopt.backends.process.events import Events
from tests.workloads import mlp

CHUNKS = 48


def test_nobody_wakes_up_for_the_report_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, wait = 0, Events.wait

    def counted(pool: Events, timeout: float) -> Any:
        nonlocal turns
        turns += 1
        return wait(pool, timeout)

    monkeypatch.setattr(Events, "wait", counted)
    case, found = mlp(samples=2 * CHUNKS), []
    with BatchOptimizer(case.module, case.criterion, optimizer=None, parallelize=2, chunk_size=2) as opt:
        opt.load(case.inputs, case.targets)
        opt.evaluate()
        for _ in range(8):
            turns = 0
            opt.evaluate()
            found.append(turns)
    assert min(found) <= CHUNKS // 4  # two workers end, and may take something from each other before


class Long:
    """A posthook that returns so many bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, worker: Worker, sample: Sample) -> bytes:
        return bytes([sample.indices[0] % 256]) * self.size


@pytest.mark.sampled
@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2**14, 2**20])
def test_a_full_pipe_is_emptied(size: int) -> None:
    case = mlp(samples=2 * CHUNKS)
    with BatchOptimizer(
        case.module, case.criterion, optimizer=None, parallelize=2, chunk_size=2, posthook=Long(size), timeout=1000.0
    ) as opt:
        opt.load(case.inputs, case.targets)
        for _ in range(2):
            opt.evaluate()
            assert opt.hook_results == [bytes([2 * chunk % 256]) * size for chunk in range(CHUNKS)]
