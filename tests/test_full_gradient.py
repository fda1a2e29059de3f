"""f and df/dX of a data set are those of one batch with all samples, however it comes in batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchoptError, BatchOptimizer, NonFiniteError, Term
from tests.workloads import Workload, logistic, misfit, mlp, rnn


def batches(work: Workload, size: int) -> list[Any]:
    """The last one may be smaller."""
    starts = range(0, len(work.inputs), size)
    return [(work.inputs[start : start + size], work.targets[start : start + size]) for start in starts]


def summed() -> Workload:
    work = mlp()
    return Workload(work.module, nn.MSELoss(reduction="sum"), work.inputs, work.targets)


def agrees(opt: BatchOptimizer, source: Any, loss: float, gradient: torch.Tensor) -> torch.Tensor:
    """The full gradient of the batches, which with f is this."""
    found, slope = opt.full_gradient(source)
    assert found == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(slope, gradient, rtol=1e-10, atol=1e-13)
    return slope


@pytest.mark.rows
@pytest.mark.parametrize("case", [mlp, logistic, summed, rnn], ids=lambda case: case.__name__)
def test_it_is_that_of_one_batch(case: Any) -> None:
    work = case()
    with BatchOptimizer(work.module, work.criterion, parallelize=2) as opt:
        x = opt.parameters.clone()
        slope = agrees(opt, batches(work, 10), *work.reference())
        assert torch.equal(opt.parameters, x)
        assert (opt.eval_counter, opt.batch_counter, opt.sample_counter) == (len(batches(work, 10)), 0, 0)
        with pytest.raises(BatchoptError, match="no batch was loaded"):
            opt.evaluate()
        slope += 1
        assert not torch.equal(slope, opt.full_gradient(batches(work, 10))[1])


def test_batches_in_which_nothing_counts_add_nothing_or_are_an_error() -> None:
    work = logistic()  # targets 10 to 13 are ignored
    with BatchOptimizer(work.module, work.criterion) as opt:
        agrees(opt, batches(work, 2), *work.reference())
        assert opt.eval_counter == 32
        for nothing in ([(work.inputs[10:14], work.targets[10:14])], []):
            with pytest.raises(ValueError, match="no sample that counts"):
                opt.full_gradient(nothing)
        assert opt.eval_counter == 32
    smoothed = nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0]).double(), label_smoothing=0.2)
    work = Workload(work.module, smoothed, work.inputs, torch.arange(67) % 3)
    with BatchOptimizer(work.module, smoothed) as opt:
        agrees(opt, batches(work, 10), *work.reference())
        with pytest.raises(ValueError, match="class weights of all targets of a batch are 0"):
            opt.full_gradient(batches(work, 1)[:3])


def test_one_term_is_weighed_and_several_are_an_error() -> None:
    work = mlp()
    loss, gradient = work.reference()
    with BatchOptimizer(work.module, terms={"a": Term(misfit, 3.0)}) as opt:
        agrees(opt, ({"a": batch} for batch in batches(work, 10)), 3 * loss, 3 * gradient)
    with (
        BatchOptimizer(work.module, terms={"a": Term(misfit), "b": Term(misfit)}) as opt,
        pytest.raises(ValueError, match="needs an objective of one term"),
    ):
        opt.full_gradient([])


def test_what_goes_wrong_leaves_counters_and_parameters() -> None:
    work = mlp()
    bad = work.inputs.clone()
    bad[25] = math.nan

    def failing() -> Iterator[Any]:
        yield from batches(work, 10)[:2]
        raise OSError("no more")

    with BatchOptimizer(work.module, work.criterion, parallelize=2) as opt:
        before = opt.fingerprint()
        with pytest.raises(NonFiniteError, match="sample 5"):
            opt.full_gradient(batches(Workload(work.module, work.criterion, bad, work.targets), 10))
        with pytest.raises(OSError, match="no more"):
            opt.full_gradient(failing())
        assert opt.fingerprint() == before
        assert opt.full_gradient(batches(work, 10))[0] == pytest.approx(work.reference()[0], rel=1e-12)
