"""What is not finite names its sample, whatever was asked; and what is not finite because evaluating it raised."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, NonFiniteError, Term, Weighted, WorkerError, extending
from tests.building import loaded
from tests.workloads import difference, misfit, size

# ---- what is asked

X = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
Y = 3 * X
WORKERS = pytest.mark.parametrize("parallelize", [1, 2])


def spoilt(value: float) -> torch.Tensor:
    """In its third chunk."""
    x = torch.ones(12, 1, dtype=torch.float64)
    x[7] = value
    return x


def root(module: nn.Module, x: torch.Tensor, _: Any) -> torch.Tensor:
    """Its slope at 0 is infinite."""
    return (module(x).square() + x).sqrt().mean()  # type: ignore[no-any-return]


def bent(module: nn.Module, x: torch.Tensor, _: Any) -> torch.Tensor:
    """Its second derivative at 0 is infinite."""
    return (module(x) + 1e-320).abs().pow(1.5).mean()  # type: ignore[no-any-return]


ONES, HUGE = spoilt(1.0), torch.full((2,), 1e300, dtype=torch.float64)
ROBUST = {"terms": {"one": Term(size), "data": Term(residual=difference, loss="cauchy", weight=0.0)}}
# By what is not finite: f, the batch, and what is asked.
SPOILT: dict[str, tuple[dict[str, Any], tuple[Any, ...], Callable[[BatchOptimizer], Any]]] = {
    "loss is nan": ({"loss_fn": misfit}, (spoilt(math.nan), ONES), lambda opt: opt.evaluate()),
    "gradient is not finite": ({"loss_fn": root}, (spoilt(0.0),), lambda opt: opt.evaluate()),
    "total is not finite": ({"loss_fn": size}, (spoilt(math.inf),), lambda opt: opt.total(lambda m, x, y: x.sum(0))),
    "Hessian-vector product is not finite": ({"loss_fn": bent}, (spoilt(0.0),), lambda opt: opt.hvp(HUGE)),
    "normal equations is not finite": ({"residual": difference}, (ONES, spoilt(-math.inf)), lambda opt: opt.normal()),
    "loss is inf": (
        ROBUST,
        ({"one": ONES[:9], "data": (Weighted(ONES, ONES[:, 0]), spoilt(math.inf))},),
        lambda opt: opt.evaluate(),
    ),
    "full gradient: loss is nan": (
        {"loss_fn": misfit},
        (ONES, ONES),
        lambda opt: opt.full_gradient([(ONES, ONES), (spoilt(math.nan), ONES)])[1],
    ),
}


@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("what", SPOILT)
def test_what_is_not_finite_names_its_sample_and_is_returned_where_that_is_wanted(what: str, parallelize: int) -> None:
    given, batch, ask = SPOILT[what]
    module = nn.Linear(1, 1).double()
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    options: dict[str, Any] = {"optimizer": None, "parallelize": parallelize, "chunk_size": 3, "check_cut": False}
    words = rf"{what.split(': ')[-1]} in chunk \d \(sample 7( of term 'data')?\)"
    with loaded(module, None, *batch, **given, **options) as opt:
        before = opt.parameters.clone(), opt.eval_counter, extending.product_counter(opt), opt.losses
        with pytest.raises(NonFiniteError, match=words) as caught:
            ask(opt)
        assert ("terms" in given) == ("of term 'data'" in str(caught.value))
        assert caught.value.terms == {"data": range(7, 8)} if "terms" in given else caught.value.samples == range(7, 8)
        assert torch.equal(opt.parameters, before[0])
        if "full" not in what:
            assert (opt.eval_counter, extending.product_counter(opt), opt.losses) == before[1:]
    with loaded(module, None, *batch, **given, **options, on_nonfinite="return") as opt:
        found = ask(opt)
        found = found[1] if isinstance(found, tuple) else found if "gradient" not in what else opt.grad_parameters
        assert "full" in what or not found.isfinite().all()


# ---- exceptions that mean so


class OddError(ArithmeticError):
    """Of the user's; a base class is named."""


class Bounded(nn.Module):
    """A slope, which has to be smaller than 2.5: the best one is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slope.item() > 2.5:
            raise OddError("too steep")
        return x * self.slope


def build(parallelize: int, **options: Any) -> BatchOptimizer:
    given = options.pop("on_nonfinite", "raise")
    options["on_nonfinite"] = given if isinstance(given, tuple) else (given, ArithmeticError)
    return BatchOptimizer(Bounded(), nn.MSELoss(), parallelize=parallelize, **options)


@pytest.mark.rows
@pytest.mark.parametrize(
    ("optimizer", "on_nonfinite", "parallelize"),
    [("lbfgs", "raise", 2), ("cg", "return", 1), ("ssbroyden", "raise", 1), ("lm", "return", 2), ("lm", "raise", 1)],
)
def test_a_trial_that_raises_is_too_long_a_step(optimizer: str, on_nonfinite: str, parallelize: int) -> None:
    with build(parallelize, optimizer=optimizer, on_nonfinite=on_nonfinite) as opt:
        loss = opt.step(X, Y)
        assert opt.parameters.item() == pytest.approx(2.5, abs=0.01)
        assert loss == pytest.approx(nn.functional.mse_loss(opt.module(X), Y).item())


@WORKERS
def test_where_a_step_begins_it_is_told(parallelize: int) -> None:
    with build(parallelize) as opt:
        opt.load(X, Y)
        before = opt.evaluate()
        opt.parameters.fill_(4.0)
        with pytest.raises(
            NonFiniteError, match=r"the loss is undefined \(OddError\) in chunk 0 \(samples 0\.\."
        ) as caught:
            opt.step(X, Y)
        assert isinstance(caught.value.__cause__, WorkerError)
        opt.parameters.fill_(2.0)
        opt.load(X, Y)
        assert opt.evaluate().item() == pytest.approx(before.item())


@WORKERS
def test_what_is_not_named_ends_the_step(parallelize: int) -> None:
    with build(parallelize, on_nonfinite=(KeyError, ZeroDivisionError)) as opt:
        opt.load(X, Y)
        with pytest.raises(WorkerError, match="OddError in worker"):
            opt.optimize()
        with pytest.raises(WorkerError, match="OddError in worker"):
            opt.evaluate_many(torch.tensor([[4.0]]))


@pytest.mark.parametrize("options", [{"chunk_size": 20}, {"parallelize": 2, "chunk_size": 20}])
@pytest.mark.parametrize("ignored", [0, 40])
def test_a_mean_over_nothing_in_one_chunk_says_what_to_do(ignored: int, options: dict[str, Any]) -> None:
    x, y = torch.randn(80, 3), torch.randint(0, 4, (80,))
    y[ignored : ignored + 20] = -1

    def loss_fn(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(module(x)[y != -1], y[y != -1])

    given: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": None, "check_cut": False, **options}
    with BatchOptimizer(torch.nn.Linear(3, 4), **given) as opt:
        opt.load(x, y)
        with pytest.raises(
            NonFiniteError, match=rf"mean over no counted targets.*`denominators`.*\(sample {ignored}\)"
        ):
            opt.evaluate()
        y[ignored + 1] = 0
        x[ignored + 1] = math.nan
        opt.load(x, y)
        with pytest.raises(NonFiniteError) as caught:
            opt.evaluate()
        assert "denominators" not in str(caught.value)
