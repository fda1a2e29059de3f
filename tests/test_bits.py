"""With fixed chunks the result has the same bits whoever evaluates what: parameters, losses, and the optimizer's
state."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import batchopt
from batchopt import BatchOptimizer
from tests.pairs import paired
from tests.workloads import WORKLOADS, Workload, mlp

ITERATIONS = 30


NO_TOLERANCE: dict[str, Any] = {"max_iter": ITERATIONS, "tolerance_grad": 0.0, "tolerance_change": 0.0}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ours": lambda params: batchopt.LBFGS(params, **NO_TOLERANCE),
    "torch": lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe", **NO_TOLERANCE),
}


def digest(data: Any) -> str:
    """The sha256 of all tensors and numbers in nested dicts and lists."""
    if isinstance(data, torch.Tensor):
        content = data.detach().contiguous().view(-1).numpy().tobytes()
    elif isinstance(data, dict):
        content = repr([(str(key), digest(data[key])) for key in sorted(data, key=str)]).encode()
    elif isinstance(data, (list, tuple)):
        content = repr([digest(part) for part in data]).encode()
    else:
        content = repr(data).encode()
    return hashlib.sha256(content).hexdigest()


def run(case: Workload, optimizer: str = "ours", **options: Any) -> tuple[str, str]:
    """The fingerprint, and the digest of the optimizer's state, after one step of thirty iterations."""
    with BatchOptimizer(case.module, case.criterion, optimizer=OPTIMIZERS[optimizer], **options) as opt:
        opt.step(case.inputs, case.targets)
        assert opt.optimizer is not None and opt.eval_counter > ITERATIONS / 2
        return opt.fingerprint(), digest(opt.optimizer.state_dict()["state"])


@cache
def alone(workload: str, optimizer: str) -> tuple[str, str]:
    """The run in one process."""
    return run(WORKLOADS[workload](torch.float32), optimizer, chunk_size=5)


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:5 chunks for 8 workers")
@pytest.mark.parametrize(
    "workload, parallelize, optimizer",
    paired(
        itertools.product(WORKLOADS, (3, 2, 5, 8), ("ours", "torch")),
        lambda row: () if row[1] == 3 else [pytest.mark.slow],
    ),
)
def test_any_number_of_workers_gives_the_same_bits(workload: str, parallelize: int, optimizer: str) -> None:
    case = WORKLOADS[workload](torch.float32)
    assert run(case, optimizer, chunk_size=5, parallelize=parallelize) == alone(workload, optimizer)


@pytest.mark.slow
def test_data_that_starts_anywhere_in_memory_gives_the_same_bits() -> None:
    """Matrix kernels differ with the alignment of their data."""

    def shifted(offset: int) -> Workload:
        case = mlp(torch.float32, samples=64)
        memory = np.empty(case.inputs.nbytes + 128, dtype=np.uint8)
        start = -memory.ctypes.data % 64 + offset
        view = torch.from_numpy(memory[start : start + case.inputs.nbytes]).view(torch.float32)
        case.inputs = view.view(case.inputs.shape).copy_(case.inputs)
        return case

    expected = run(shifted(0), chunk_size=16)
    for parallelize in (1, 2):
        for offset in (4, 8, 32):
            assert run(shifted(offset), chunk_size=16, parallelize=parallelize) == expected


@pytest.mark.slow
def test_deterministic_algorithms_fix_the_chunks() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = [run(mlp(torch.float32, samples=200), parallelize=parallelize) for parallelize in (1, 2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]


def test_the_fingerprint_tells_runs_apart() -> None:
    def fingerprint(scale: float = 1.0, steps: int = 1) -> str:
        case = mlp()
        with torch.no_grad():
            next(case.module.parameters()).mul_(scale)
        with BatchOptimizer(case.module, case.criterion, optimizer="sgd") as opt:
            for _ in range(steps):
                opt.step(case.inputs, case.targets)
            return opt.fingerprint()

    assert fingerprint() == fingerprint() != fingerprint(scale=1 + 1e-15)
    assert len({fingerprint(), fingerprint(steps=2), fingerprint(steps=0)}) == 3


@pytest.mark.parametrize("parallelize", [1, 2])
def test_the_optimizers_algebra_has_as_many_threads_for_any_number_of_workers(parallelize: int) -> None:
    """Its dot products have other bits with another number of threads."""
    threads: list[int] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            threads.append(torch.get_num_threads())
            return loss

    case, before = mlp(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with BatchOptimizer(
            case.module, case.criterion, optimizer=Noting, parallelize=parallelize, chunk_size=8
        ) as opt:
            opt.step(case.inputs, case.targets)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert threads == [1]
