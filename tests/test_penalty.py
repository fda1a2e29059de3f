"""Terms without samples: exact for any number of workers, and absent from batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchopt import SVRG, Batches, BatchOptimizer, NonFiniteError, Penalty, Term, WorkerError
from batchopt.training import fit

TERMS = {
    "data": Term(lambda m, x, y: (m(x) - y).square().mean()),
    "ridge": Penalty(lambda m: m.weight.square().sum(), weight=0.1),
}
SQUARES = {
    "data": Term(residual=lambda m, x, y: m(x) - y),
    "ridge": Penalty(residual=lambda m: m.weight, weight=0.5),  # the mean of five
}


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 1, bias=False).double()


def batch() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"data": (torch.randn(70, 5, dtype=torch.float64), torch.randn(70, 1, dtype=torch.float64))}


def ridge() -> torch.Tensor:
    """The minimum of both."""
    x, y = batch()["data"]
    found: torch.Tensor = torch.linalg.solve(
        x.T @ x / 70 + 0.1 * torch.eye(5, dtype=torch.float64), x.T @ y / 70
    ).ravel()
    return found


@pytest.mark.parametrize("terms", [TERMS, SQUARES], ids=["function", "residual"])
@pytest.mark.parametrize("parallelize", [1, 3])
def test_f_and_its_gradient_are_those_of_torch(terms: dict[str, Any], parallelize: int) -> None:
    module, (x, y) = line(), batch()["data"]
    f = (module(x) - y).square().mean() + 0.1 * module.weight.square().sum()
    (gradient,) = torch.autograd.grad(f, [module.weight])
    with BatchOptimizer(module, terms=terms, optimizer=None, parallelize=parallelize) as opt:
        opt.load(batch())
        assert opt.evaluate().item() == pytest.approx(f.item(), rel=1e-12)
        torch.testing.assert_close(opt.grad_parameters, gradient.ravel(), rtol=1e-12, atol=0)
        assert opt.weights["ridge"] == terms["ridge"].weight
        opt.weights = {"data": 1.0, "ridge": 0.0}
        opt.load(batch())
        assert opt.evaluate().item() == pytest.approx(opt.losses["data"], rel=1e-12)


@pytest.mark.parametrize(("terms", "optimizer"), [(TERMS, "lbfgs"), (SQUARES, "lm")], ids=["lbfgs", "lm"])
def test_the_minimum_is_that_of_a_dense_solve_to_the_same_bits(terms: dict[str, Any], optimizer: str) -> None:
    found = set()
    for parallelize in (1, 2, 3):
        with BatchOptimizer(line(), terms=terms, optimizer=optimizer, parallelize=parallelize, chunk_size=20) as opt:
            for _ in range(3):
                opt.step(batch())
            torch.testing.assert_close(opt.parameters, ridge(), rtol=1e-7, atol=1e-7)
            found.add(opt.fingerprint())
    assert len(found) == 1


def test_least_squares_have_its_residuals_and_functions_of_the_samples_do_not() -> None:
    with BatchOptimizer(line(), terms=SQUARES, optimizer=None, parallelize=2) as opt:
        opt.load(batch())
        f, normal = opt.evaluate(), opt.normal()
        assert normal.loss == pytest.approx(f.item(), rel=1e-12)
        torch.testing.assert_close(2 * normal.vector, opt.grad_parameters)
        found = opt.residuals()
        assert found["ridge"].shape == (1, 5)
        assert torch.equal(found["ridge"].ravel(), opt.parameters)
        assert [*opt.residuals(batch())] == ["data"]
        assert opt.collect(lambda m, x, y: m(x))["data"].shape == (70, 1)
        assert [*opt.collect(lambda m, x, y: m(x), batch())] == [*opt.input_gradients()] == ["data"]
        with pytest.raises(ValueError, match="'ridge', and there is no such term: there are"):
            opt.total({"ridge": lambda m, x, y: x})


def test_loaders_checks_and_checkpoints_have_batches_without_it(tmp_path: Any) -> None:
    made: dict[str, Any] = {"terms": TERMS, "optimizer": "adam", "chunk_size": 4}
    with BatchOptimizer(line(), **made, parallelize=2) as opt:
        assert opt.check(batch()).healthy
        assert fit(opt, Batches(batch(), 10), epochs=1).iteration == 7
        opt.save(tmp_path / "checkpoint.pt")
        losses = list(opt.steps(Batches(batch(), 20)))
    with BatchOptimizer(line(), **made) as opt:
        opt.load_checkpoint(tmp_path / "checkpoint.pt")
        assert list(opt.steps(Batches(batch(), 20))) == losses


def test_the_gradient_of_many_batches_has_it_once() -> None:
    with BatchOptimizer(line(), terms=TERMS, optimizer=None, parallelize=2) as opt:
        f, gradient = opt.full_gradient(Batches(batch(), 20))  # of which the last one is shorter
        opt.load(batch())
        assert f == pytest.approx(opt.evaluate().item(), rel=1e-12)
        torch.testing.assert_close(gradient, opt.grad_parameters, rtol=1e-12, atol=1e-14)
    terms = {"data": Term(lambda m, x, y: (m(x) - y).square().sum(), reduction="sum"), "ridge": TERMS["ridge"]}
    with BatchOptimizer(line(), terms=terms, optimizer=None) as opt:  # each batch of a sum would add it
        with pytest.raises(ValueError, match="penalties only beside a mean"):
            opt.full_gradient(Batches(batch(), 20))
    with BatchOptimizer(line(), terms=TERMS, optimizer=lambda p: SVRG(torch.optim.SGD(p, lr=0.05))) as opt:
        fit(opt, Batches(batch(), 10, shuffle=True), epochs=60)
        torch.testing.assert_close(opt.parameters, ridge(), rtol=1e-4, atol=1e-4)


def test_a_penalty_is_the_logarithm_of_a_prior() -> None:
    x, _ = batch()["data"]
    terms = {
        "data": Term(lambda m, x, y: (m(x) - y).square().sum() / 2, reduction="sum"),
        "prior": Penalty(lambda m: m.weight.square().sum() / 2, weight=3.0),
    }
    with BatchOptimizer(line(), terms=terms) as opt:
        opt.step(batch())
        opt.step(batch())
        covariance = opt.covariance()
    expected = torch.linalg.inv(x.T @ x + 3.0 * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(covariance.matrix, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("sigma", [1.0, None])
def test_residuals_of_a_penalty_are_those_of_a_prior_beside_sums(sigma: float | None) -> None:
    x, y = batch()["data"]
    data = Term(residual=lambda m, x, y: m(x) - y, reduction="sum")
    prior = Penalty(residual=lambda m: m.weight, weight=15.0)  # a mean of five squares: each has the weight 3
    with BatchOptimizer(line(), terms={"data": data, "prior": prior}, optimizer="lm") as opt:
        opt.step(batch())
        found = opt.covariance(sigma=sigma)
    best = torch.linalg.solve(x.T @ x + 3.0 * torch.eye(5, dtype=torch.float64), x.T @ y)
    squares = (x @ best - y).square().sum() + 3.0 * best.square().sum()
    variance = 1.0 if sigma else squares / len(x)  # five numbers more, and five parameters
    expected = variance * torch.linalg.inv(x.T @ x + 3.0 * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(found.matrix, expected, rtol=1e-8, atol=0)
    assert found.likelihood is None and "variances that are one number / weight" in found.assumes


def test_a_batch_that_has_it_is_refused() -> None:
    with BatchOptimizer(line(), terms=TERMS, optimizer=None) as opt:
        with pytest.raises(ValueError, match=r"has \['ridge'\], which is a Penalty.*leave it out"):
            opt.load({**batch(), "ridge": torch.zeros(1)})
        with pytest.raises(ValueError, match=r"lacks \['data'\]: the terms are \['data'\]"):
            opt.load({})


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda m: m.weight, WorkerError, r"sample 0 of term 'p': `function` must return a scalar; got shape \(1, 5\)"),
        (lambda m: 1.0, WorkerError, "`function` must return a scalar tensor; got float"),
        (lambda m: m.weight.sum() * torch.inf, NonFiniteError, "sample 0 of term 'p'"),
        (lambda m: m.weight.detach().sum(), WorkerError, "`function` does not depend on any trainable parameter"),
    ],
    ids=["shape", "number", "infinite", "constant"],
)
def test_a_function_that_is_no_penalty_is_an_error_that_names_it(function: Any, error: Any, says: str) -> None:
    with BatchOptimizer(line(), terms={"p": Penalty(function)}) as opt, pytest.raises(error, match=says):
        opt.step({})


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"callable as function\(module\); got a function of \(m, x, y\)"):
        Penalty(lambda m, x, y: m(x))  # type: ignore[arg-type, misc]
    with pytest.raises(TypeError, match="got both"):
        Penalty(lambda m: m.a, residual=lambda m: m.a)
    with pytest.raises(TypeError, match="got None"):
        Penalty(weight=2.0)
    with pytest.raises(ValueError, match="`weight` of a Penalty"):
        Penalty(lambda m: m.a, weight=-1.0)
    free = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"'loss_fn\.function\.free' is a tensor"):
        BatchOptimizer(line(), terms={"p": Penalty(lambda m: free.sum())})
