"""Random numbers depend on the seed, the step and the chunk alone, and the caller goes on as if none had been drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from batchopt import BatchOptimizer, Sample, Worker, WorkerError
from tests.building import on
from tests.workloads import mlp


def draw(worker: Worker | None = None, sample: Sample | None = None) -> list[tuple[float, ...]]:
    """By torch, NumPy and `random`."""
    return [(*torch.rand(3).tolist(),), (*np.random.random(3),), tuple(random.random() for _ in range(3))]


def drawn(seed: int) -> list[list[tuple[float, ...]]]:
    """The numbers of each chunk, in two steps."""
    case, found = mlp(samples=9), []
    with BatchOptimizer(case.module, case.criterion, optimizer=None, seed=seed, chunk_size=3, posthook=draw) as opt:
        for _ in range(2):
            opt.load(case.inputs, case.targets)
            opt.evaluate()
            found += opt.hook_results
    return found


def test_each_seed_step_and_chunk_has_numbers_of_its_own_from_every_generator() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    found = [numbers for seed in seeds for numbers in drawn(seed)]
    assert found == [numbers for seed in seeds for numbers in drawn(seed)]
    for numbers in zip(*found, strict=True):
        assert len(set(numbers)) == len(found) == len(seeds) * 2 * 3


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_the_callers_draws_go_on_also_within_a_pair_of_normal_ones(generator: Any, fails: bool) -> None:
    def hook(worker: Worker, sample: Sample) -> None:
        draw()
        np.random.standard_normal(2)
        if fails:
            raise ZeroDivisionError

    before: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    found = []
    try:
        with on(mlp(), posthook=hook) as opt:
            for disturbed in (False, True):
                np.random.set_bit_generator(generator(3))  # type: ignore[attr-defined]
                torch.manual_seed(0)
                random.seed(0)
                np.random.standard_normal(3)  # the fourth is kept
                if disturbed and fails:
                    with pytest.raises(WorkerError):
                        opt.evaluate()
                elif disturbed:
                    opt.evaluate()
                found.append((draw(), np.random.standard_normal(4).tolist()))
        assert type(np.random.get_bit_generator()) is generator  # type: ignore[attr-defined]
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
    assert found[0] == found[1]
