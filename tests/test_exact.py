"""f and df/dX are those of plain torch on the whole batch, for any number of workers."""

from __future__ import annotations

import pytest
import torch

import batchopt
from tests.workloads import WORKLOADS


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("parallelize", [1, 2, 3, 5])
def test_loss_and_gradient_are_those_of_plain_torch(parallelize: int, workload: str, chunk_size: int | None) -> None:
    # Both precisions in one test: starting the workers is what takes time.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        if dtype is torch.float32 and chunk_size is not None:
            continue
        case = WORKLOADS[workload](dtype)
        loss, gradient = case.reference()
        with batchopt.BatchOptimizer(
            case.module, case.criterion, optimizer=None, parallelize=parallelize, chunk_size=chunk_size
        ) as opt:
            opt.load(case.inputs, case.targets)
            found = opt.evaluate()
        assert found.item() == pytest.approx(loss, rel=tolerance)
        error = (opt.grad_parameters - gradient).norm() / gradient.norm()
        assert error.item() <= tolerance
