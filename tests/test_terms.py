"""Objectives of several terms: each over data of its own, summed with weights, exactly and bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, NonFiniteError, Sample, Term, Worker, WorkerError
from tests.building import loaded
from tests.workloads import misfit, size

WEIGHTS = {"pde": 1.5, "data": 10.0}
POINTS, KNOWN = 23, 9
EACH = pytest.mark.parametrize("parallelize", [1, 2])


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def residual(module: nn.Module, points: torch.Tensor, targets: None) -> torch.Tensor:
    """The mean square of u'' + u."""
    assert targets is None
    points = points.detach().requires_grad_()
    u = module(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), points, create_graph=True)
    loss: torch.Tensor = (second + u).square().mean()
    return loss


def terms(**weights: float) -> dict[str, Term]:
    weights = {**WEIGHTS, **weights}
    return {"pde": Term(residual, weights["pde"]), "data": Term(misfit, weights["data"])}


def data(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    points = torch.linspace(-2, 2, POINTS, dtype=dtype).view(-1, 1)
    known = torch.linspace(-1, 1, KNOWN, dtype=dtype).view(-1, 1)
    return {"pde": points, "data": (known, known.sin())}


def plain(module: nn.Module, weights: dict[str, float] = WEIGHTS) -> tuple[float, torch.Tensor, dict[str, float]]:
    """f, df/dX and the terms by torch alone."""
    batch = data()
    each = {"pde": residual(module, batch["pde"], None), "data": misfit(module, *batch["data"])}
    f = weights["pde"] * each["pde"] + weights["data"] * each["data"]
    gradients = torch.autograd.grad(f, list(module.parameters()))
    return f.item(), torch.cat([g.flatten() for g in gradients]), {name: t.item() for name, t in each.items()}


def made(**options: Any) -> BatchOptimizer:
    """The two terms over the network."""
    return BatchOptimizer(network(), terms=terms(), **{"optimizer": None, **options})


def agrees(opt: BatchOptimizer, f: float, gradient: torch.Tensor, losses: dict[str, float]) -> None:
    """One evaluation has these numbers."""
    assert opt.evaluate().item() == pytest.approx(f, rel=1e-12)
    torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-12, atol=1e-13)
    assert list(opt.losses) == list(losses)
    assert opt.losses == pytest.approx(losses, rel=1e-12)


def test_new_weights_count_from_the_next_batch_on() -> None:
    module = network()
    old, new = plain(module), plain(module, {"pde": 0.0, "data": 0.5})
    with BatchOptimizer(module, terms=terms(), optimizer=None, parallelize=2) as opt:
        opt.load(data())
        opt.weights = {"data": 0.5, "pde": 0}
        assert opt.weights == {"pde": 0.0, "data": 0.5}
        agrees(opt, *old)
        opt.load(data())
        agrees(opt, *new)


def test_a_term_of_weight_0_is_evaluated_and_adds_nothing() -> None:
    module = nn.ModuleDict({"one": network(), "other": nn.Linear(1, 1).double()})
    x, y = data()["data"]
    terms = {
        "a": Term(lambda m, x, y: misfit(m["one"], x, y)),  # type: ignore[index]
        "b": Term(lambda m, x, _: size(m["other"], x), 0.0),  # type: ignore[index]
    }
    with loaded(module, None, {"a": (x, y), "b": x}, terms=terms) as opt:
        assert opt.evaluate().item() == opt.losses["a"]
        assert opt.losses["b"] == pytest.approx(size(module["other"], x).item())
    assert module["other"].weight.grad is None


def test_the_gradients_of_terms_are_those_of_torch_and_sum_up_to_that_of_f() -> None:
    found = set()
    for parallelize in (1, 2, 3):
        module = network()
        with made(parallelize=parallelize, chunk_size=5) as opt:
            opt.load(data())
            each = opt.term_gradients()
            assert opt.eval_counter == 0
            opt.evaluate()
            torch.testing.assert_close(each["pde"] + each["data"], opt.grad_parameters, rtol=1e-12, atol=1e-13)
        for name, other in (("pde", "data"), ("data", "pde")):
            _, gradient, _ = plain(module, {**WEIGHTS, other: 0.0})
            torch.testing.assert_close(each[name], gradient, rtol=1e-12, atol=1e-13)
        found.add(tuple(torch.cat([*each.values()]).tolist()))
    assert len(found) == 1


def test_gradients_of_terms_need_terms_and_have_the_dtype_of_x() -> None:
    with loaded(network(torch.float32), None, data(torch.float32), terms=terms(pde=0.0), parallelize=2) as opt:
        each = opt.term_gradients()
        assert each["data"].dtype == torch.float32
        assert not each["pde"].any()
    with loaded(network(), nn.MSELoss(), *data()["data"]) as opt, pytest.raises(ValueError, match="there are no terms"):
        opt.term_gradients()


def test_hooks_see_the_term_and_the_positions_within_it() -> None:
    def note(worker: Worker, sample: Sample) -> Any:
        return sample.term, sample.indices, sample.options, sample.loss

    batch = data()
    batch["data"] = (*batch["data"], list(range(KNOWN)))
    with made(parallelize=2, chunk_size=20, posthook=note) as opt:
        opt.load(batch)
        opt.evaluate()
        found = opt.hook_results
        losses = opt.losses
    assert [result[:3] for result in found] == [
        ("pde", range(0, 20), None),
        ("pde", range(20, 23), None),
        ("data", range(0, 9), list(range(9))),
    ]
    assert found[2][3] == pytest.approx(losses["data"], rel=1e-12)


def broken(*given: Any) -> Any:
    """A loss function, or one that collates."""
    if len(given) == 1 or (given[1] == 0).any():
        raise ArithmeticError("no")
    return misfit(*given)


@EACH
def test_an_error_in_a_term_names_it_and_its_samples(parallelize: int) -> None:
    both = {"pde": Term(residual), "bc": Term(broken)}
    batch = data()
    options: dict[str, Any] = {"chunk_size": 5, "parallelize": parallelize, "speeds": [1] * parallelize}
    with loaded(network(), None, {"pde": batch["pde"], "bc": batch["data"]}, terms=both, **options) as opt:
        with pytest.raises(
            WorkerError, match=r"ArithmeticError in worker \d, samples 2\.\.6 of term 'bc': no"
        ) as caught:
            opt.evaluate()
        assert caught.value.terms == {"bc": range(2, 7)} and caught.value.samples == range(25, 30)
    both["bc"] = Term(misfit, collate_fn=broken)
    options["chunk_size"] = 30
    with BatchOptimizer(network(), terms=both, optimizer=None, **options) as opt:
        with pytest.raises(WorkerError, match=r"samples 0\.\.6 of term 'bc': no"):
            opt.load({"pde": batch["pde"], "bc": ([*batch["data"][0]], [*batch["data"][1]])})
            opt.evaluate()


def test_an_infinite_sum_is_returned_where_that_is_wanted_and_is_no_number_for_the_optimizer() -> None:
    batch = data()
    batch["data"] = (batch["data"][0], batch["data"][1] * 1e3)
    with loaded(network(), None, batch, terms=terms(data=1e308), on_nonfinite="return") as opt:
        assert opt.evaluate().item() == math.inf
        assert math.isfinite(opt.losses["data"])
    with BatchOptimizer(network(), terms={"high": Term(lambda m, x, _: m(x).sum() * 0 + 1e10, 1e300)}) as opt:
        with pytest.raises(NonFiniteError, match="or the sum overflows"):
            opt.step({"high": X})


def test_a_checkpoint_has_the_weights(tmp_path: Path) -> None:
    found = []
    for saved in (False, True):
        with made(optimizer="sgd", chunk_size=5) as opt:
            opt.step(data())
            opt.weights = {"pde": 2.0, "data": 0.125}
            if saved:
                opt.save(tmp_path / "checkpoint")
            opt.step(data())
            found.append(opt.fingerprint())
    with made(optimizer="sgd", chunk_size=5, parallelize=2) as opt:
        opt.load_checkpoint(tmp_path / "checkpoint")
        assert opt.weights == {"pde": 2.0, "data": 0.125} and opt.losses.keys() == {"pde", "data"}
        opt.step(data())
        assert [opt.fingerprint()] * 2 == found
    with BatchOptimizer(network(), terms={"else": Term(misfit)}, optimizer="sgd") as opt:
        with pytest.raises(RuntimeError, match="has unknown"):
            opt.load_checkpoint(tmp_path / "checkpoint")
        assert opt.weights == {"else": 1.0} and opt.batch_counter == 0


X = torch.ones(3, 1, dtype=torch.float64)
