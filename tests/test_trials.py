"""What a step says of its loss is of the parameters that it leaves; nothing is saved in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import batchopt
from batchopt import BatchoptError, BatchOptimizer, Sample, Term, Worker
from tests.workloads import Mlp, misfit, mlp, size


def valley(scale: float) -> nn.Module:
    """Where line searches try points that are much worse than those they end at."""
    torch.manual_seed(0)
    module = Mlp().double()
    for parameter in module.parameters():
        parameter.data.mul_(scale)
    return module


OPTIMIZERS: dict[str, Any] = {
    **{f"at most {n}": lambda params, n=n: batchopt.LBFGS(params, max_iter=20, max_eval=n) for n in (2, 4)},
    "armijo": lambda params: batchopt.LBFGS(params, max_iter=3, line_search_fn="armijo"),
    "cg": lambda params: batchopt.CG(params, max_iter=4),
    "penalised": lambda params: batchopt.LBFGS(params, max_iter=4, l1=1e-3),
}


@pytest.mark.rows
@pytest.mark.parametrize(("name", "scale"), [("at most 2", 0.3), *((name, 5.0) for name in OPTIMIZERS)])
def test_the_loss_of_a_step_is_that_of_the_parameters_it_leaves(name: str, scale: float) -> None:
    case, module = mlp(), valley(scale)
    with BatchOptimizer(module, case.criterion, optimizer=OPTIMIZERS[name]) as opt:
        for _ in range(6):
            found = opt.step(case.inputs, case.targets)
            expected = case.criterion(module(case.inputs), case.targets).item()
            assert found == opt.output == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("parallelize", [1, 2])
def test_the_losses_of_the_terms_are_of_the_same_point_and_the_fingerprint_is_of_all(parallelize: int) -> None:
    case, module = mlp(), valley(5.0)
    terms = {"a": Term(misfit), "b": Term(size, 0.5)}
    with BatchOptimizer(module, terms=terms, optimizer=OPTIMIZERS["at most 4"], parallelize=parallelize) as opt:
        for _ in range(5):
            found = opt.step({"a": (case.inputs, case.targets), "b": case.inputs})
            a, b = (term(module, case.inputs, case.targets).item() for term in (misfit, size))
            assert opt.losses == {"a": pytest.approx(a, rel=1e-12), "b": pytest.approx(b, rel=1e-12)}
            assert found == pytest.approx(a + 0.5 * b, rel=1e-12)
        assert list(opt.steps([{"a": (case.inputs, case.targets), "b": case.inputs}] * 2))[-1] == opt.output


# ---- nothing is saved in the middle of a step


CALLS: dict[str, Callable[[BatchOptimizer, Any], Any]] = {
    "save": lambda opt, path: opt.save(path),
    "state_dict": lambda opt, path: opt.state_dict(),
    "load_state_dict": lambda opt, path: opt.load_state_dict({}),
    "load_checkpoint": lambda opt, path: opt.load_checkpoint(path),
}


@pytest.mark.rows
@pytest.mark.parametrize("name", CALLS)
def test_a_hook_cannot_save_or_load_in_the_middle_of_a_step(name: str, tmp_path: Any) -> None:
    case = mlp()
    errors: list[str] = []

    def hook(worker: Worker, sample: Sample) -> None:
        with pytest.raises(BatchoptError, match="in the middle of ") as caught:
            CALLS[name](opt, tmp_path / "state")
        errors.append(str(caught.value))

    with BatchOptimizer(valley(1.0), case.criterion, optimizer="sgd") as opt:
        opt.save(tmp_path / "state")
        written = (tmp_path / "state").read_bytes()
        opt.prehook = hook
        opt.step(case.inputs, case.targets)
        opt.load(case.inputs, case.targets)
        opt.evaluate()
        opt.hvp(torch.ones_like(opt.parameters))
        opt.full_gradient([(case.inputs, case.targets)])
        opt.check(case.inputs, case.targets)
        assert len(errors) >= 5  # a step, an evaluation, a product, a full gradient, an examination
        assert (tmp_path / "state").read_bytes() == written
        opt.prehook = None
        opt.load_checkpoint(tmp_path / "state")  # between steps
