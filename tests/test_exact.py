"""f and df/dX are those of plain torch on the whole batch, for any number of workers."""

from __future__ import annotations

import pytest
import torch

import batchopt
from tests.workloads import WORKLOADS


@pytest.mark.rows
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("parallelize", [1, 3])
def test_loss_and_gradient_are_those_of_plain_torch(parallelize: int, workload: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        case = WORKLOADS[workload](dtype)
        loss, gradient = case.reference()
        with batchopt.BatchOptimizer(case.module, case.criterion, optimizer=None, parallelize=parallelize) as opt:
            opt.load(case.inputs, case.targets)
            found = opt.evaluate()
        assert found.item() == pytest.approx(loss, rel=tolerance)
        error = (opt.grad_parameters - gradient).norm() / gradient.norm()
        assert error.item() <= tolerance
