"""Weights of samples and robust losses: as plain torch and SciPy compute them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from torch import nn

from batchopt import BatchOptimizer, LevenbergMarquardt, NonFiniteError, Term, Weighted
from batchopt_workers.map.squares import LOSSES, ROBUST, MeanSquare
from tests.building import loaded
from tests.workloads import difference

EACH = pytest.mark.parametrize("parallelize", [1, 2])
ROBUST_LOSSES = pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "linear"])
N = 40
X = torch.linspace(-2.0, 2.0, N * 3, dtype=torch.float64).reshape(N, 3).sin()
Y = torch.linspace(-1.0, 3.0, N * 2, dtype=torch.float64).reshape(N, 2).cos()
Y[7] += 30.0  # an outlier
W = torch.linspace(0.0, 5.0, N, dtype=torch.float64).cos().square()
W[3:9] = 0.0


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def close(found: tuple[float, torch.Tensor], loss: torch.Tensor, module: nn.Module) -> None:
    """f and df/dX are the loss and its gradient."""
    expected = torch.autograd.grad(loss, [*module.parameters()])
    assert found[0] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(found[1], torch.cat([g.reshape(-1) for g in expected]), rtol=1e-10, atol=1e-14)


# ---- weights of samples


def classes(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) % 3


def class_loss(**options: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The mean by its definition: weighted losses by the weights that count."""
    weights = options.get("weight", torch.ones(3, dtype=torch.float64))

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        each = nn.functional.cross_entropy(output, targets, reduction="none", **options).reshape(N, -1)
        counted = (weights[targets.clamp(min=0)] * (targets != -100)).reshape(N, -1)
        found: torch.Tensor = (W[:, None] * each).sum() / (W[:, None] * counted).sum()
        return found

    return loss


def mean(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        each = function(output, targets, reduction="none").reshape(N, -1).mean(1)
        return (W * each).sum() / W.sum()

    return loss


IGNORED = classes(N)
IGNORED[::5] = -100
UNEQUAL = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
F = nn.functional
CASES: dict[str, tuple[Any, torch.Tensor, int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "squares": (nn.MSELoss(), Y, 2, mean(F.mse_loss)),
    "sum of squares": (nn.MSELoss(reduction="sum"), Y, 2, lambda o, t: (W[:, None] * (o - t).square()).sum()),
    "absolute": (nn.L1Loss(), Y, 2, mean(F.l1_loss)),
    "huber": (nn.HuberLoss(delta=0.3), Y, 2, mean(lambda o, t, reduction: F.huber_loss(o, t, reduction, 0.3))),
    "batchmean": (
        nn.KLDivLoss(reduction="batchmean"),
        Y.softmax(1),
        2,
        lambda o, t: (W[:, None] * F.kl_div(o, t, reduction="none")).sum() / W.sum(),
    ),
    "logits": (nn.BCEWithLogitsLoss(), Y.sigmoid(), 2, mean(F.binary_cross_entropy_with_logits)),
    "logits with weights of entries": (
        nn.BCEWithLogitsLoss(weight=Y.abs()),
        Y.sigmoid(),
        2,
        mean(lambda o, t, reduction: F.binary_cross_entropy_with_logits(o, t, Y.abs(), reduction=reduction)),
    ),
    "classes": (nn.CrossEntropyLoss(), classes(N), 3, class_loss()),
    "classes, some ignored": (nn.CrossEntropyLoss(), IGNORED, 3, class_loss()),
    "classes with weights": (nn.CrossEntropyLoss(weight=UNEQUAL), IGNORED, 3, class_loss(weight=UNEQUAL)),
    "classes, smoothed": (
        nn.CrossEntropyLoss(weight=UNEQUAL, label_smoothing=0.1),
        IGNORED,
        3,
        class_loss(weight=UNEQUAL, label_smoothing=0.1),
    ),
    "probabilities": (nn.CrossEntropyLoss(), torch.eye(3, dtype=torch.float64)[classes(N)], 3, mean(F.cross_entropy)),
}


@EACH
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("case", CASES)
def test_criteria(parallelize: int, chunk_size: int | None, case: str) -> None:
    criterion, targets, outputs, loss = CASES[case]
    module = network(outputs)
    with loaded(module, criterion, Weighted(X, W), targets, parallelize=parallelize, chunk_size=chunk_size) as opt:
        found = opt.evaluate().item(), opt.grad_parameters.clone()
        reference = network(outputs)
        close(found, loss(reference(X), targets), reference)


@EACH
@pytest.mark.parametrize("form", ["list", "dataset", "array"])
def test_forms_of_batches(parallelize: int, form: str) -> None:
    class Items(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            return X[index], Y[index]

    inputs: Any = {"list": [*X], "dataset": Items(), "array": X.numpy()}[form]
    targets: Any = {"list": [*Y], "dataset": None, "array": Y.numpy()}[form]
    module, reference = network(), network()
    with loaded(
        module, nn.MSELoss(), Weighted(inputs, W.tolist()), targets, parallelize=parallelize, chunk_size=9
    ) as opt:
        found = opt.evaluate().item(), opt.grad_parameters.clone()
    close(found, mean(F.mse_loss)(reference(X), Y), reference)


@EACH
def test_terms_steps_and_another_weight(parallelize: int) -> None:
    module, reference = network(), network()
    terms = {"one": Term(residual=difference), "two": Term(residual=difference, weight=0.5, reduction="sum")}
    with BatchOptimizer(module, terms=terms, optimizer=None, parallelize=parallelize) as opt:
        opt.step({"one": (Weighted(X, W), Y), "two": (X[:5], Y[:5])})
        found = opt.output, opt.grad_parameters.clone()
        (again,) = opt.steps([{"one": (Weighted(X, 2 * W), Y), "two": (Weighted(X[:5], np.ones(5)), Y[:5])}])
    squares = (reference(X) - Y).square()
    close(found, (W @ squares.mean(1)) / W.sum() + 0.5 * squares[:5].sum(), reference)
    assert again == pytest.approx(found[0], rel=1e-12)


def test_bits_do_not_depend_on_the_number_of_workers() -> None:
    found = []
    for parallelize in (1, 2, 3):
        with BatchOptimizer(network(), nn.MSELoss(), parallelize=parallelize, chunk_size=6) as opt:
            opt.step(Weighted(X, W), Y)
            found.append(opt.parameters.clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_products_and_input_gradients_have_the_weights() -> None:
    module = network()
    with loaded(module, nn.MSELoss(), Weighted(X, W), Y, chunk_size=8) as opt:
        v = torch.linspace(-1.0, 1.0, len(opt.parameters), dtype=torch.float64)
        product, slopes = opt.hvp(v), opt.input_gradients()
    reference, inputs = network(), X.clone().requires_grad_()
    parameters = [*reference.parameters()]
    loss = mean(F.mse_loss)(reference(inputs), Y)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    expected = torch.autograd.grad(gradient @ v, parameters, retain_graph=True)
    torch.testing.assert_close(product, torch.cat([g.reshape(-1) for g in expected]))
    torch.testing.assert_close(slopes, torch.autograd.grad(loss, inputs)[0])


def test_weights_of_any_size() -> None:
    module = network().float()
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, chunk_size=10) as opt:
        found = []
        for unit in (1.0, 1e-60, 1e60):
            opt.load(Weighted(X.float(), unit * W), Y.float())
            found.append(opt.evaluate().item())
    assert found == pytest.approx([found[0]] * 3, rel=1e-6) and math.isfinite(found[0])


@pytest.mark.filterwarnings("ignore:.*rows of the Jacobian took a backward each")
@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 0.5]])
@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_samples_of_different_numbers_of_residuals(weights: list[float] | None, loss: str) -> None:
    inputs, targets = [X[:1], X[1:4], X[4:6]], [Y[:1], Y[1:4], Y[4:6]]
    terms = {"one": Term(residual=difference, loss=loss, scale=0.3)}
    with loaded(
        network(), None, {"one": (inputs if weights is None else Weighted(inputs, weights), targets)}, terms=terms
    ) as opt:
        f, gradient = opt.evaluate().item(), opt.grad_parameters.clone()
        squares, x = opt.objective().least_squares(), opt.objective().x0
        fun, jac = squares.fun(x), squares.jac(x)
        assert opt.normal().loss == pytest.approx(f, rel=1e-12)
    assert 0.5 * float(fun @ fun) == pytest.approx(f, rel=1e-12)
    np.testing.assert_allclose(jac.T @ fun, gradient.numpy(), rtol=1e-9, atol=1e-12)


# ---- robust losses


def plain(loss: str, z: torch.Tensor) -> torch.Tensor:
    """rho(z), as SciPy's page has it."""
    match loss:
        case "soft_l1":
            return 2 * ((1 + z).sqrt() - 1)
        case "huber":
            return torch.where(z <= 1, z, 2 * z.sqrt() - 1)
        case "cauchy":
            return (1 + z).log()
        case _:
            return z.atan()


@pytest.mark.sampled
@EACH
@ROBUST_LOSSES
@pytest.mark.parametrize("weights", [None, W])
def test_f_gradient_and_normal_equations(parallelize: int, loss: str, weights: torch.Tensor | None) -> None:
    module, reference, scale = network(), network(), 0.4
    terms = {"one": Term(residual=difference, loss=loss, scale=scale, weight=3.0)}
    with loaded(
        module,
        None,
        {"one": (X if weights is None else Weighted(X, weights), Y)},
        terms=terms,
        parallelize=parallelize,
        chunk_size=11,
    ) as opt:
        found = opt.evaluate().item(), opt.grad_parameters.clone()
        normal = opt.normal()
        v = torch.linspace(-1.0, 1.0, len(opt.parameters), dtype=torch.float64)
        product = opt.gauss_newton(v)
        squares, x = opt.objective().least_squares(), opt.objective().x0
        fun, jac, operator = squares.fun(x), squares.jac(x), squares.operator(x)
        by_products = operator.rmatvec(fun), operator.matvec(v.numpy())
    counted = torch.ones(N, dtype=torch.float64) if weights is None else weights
    r = reference(X) - Y
    close(found, 3 * scale**2 * (counted @ plain(loss, (r / scale) ** 2).mean(1)) / counted.sum(), reference)
    assert normal.loss == pytest.approx(found[0], rel=1e-12)
    torch.testing.assert_close(2 * normal.vector, found[1])
    torch.testing.assert_close(normal.matrix @ v, product)
    # the matrix that SciPy makes of residuals and Jacobian: J scaled with the root of rho' + 2 z rho'', at least eps
    r = reference(X) - Y
    z = ((r / scale) ** 2).detach().requires_grad_()
    (first,) = torch.autograd.grad(plain(loss, z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z) if first.requires_grad else (torch.zeros_like(z),)
    curved = (first + 2 * z * second).detach().clamp(min=torch.finfo(torch.float64).eps)
    weight = 3 * counted[:, None] * curved / (2 * counted.sum())
    rows = torch.stack(
        [
            torch.cat([g.reshape(-1) for g in torch.autograd.grad(one, [*reference.parameters()], retain_graph=True)])
            for one in r.reshape(-1)
        ]
    )
    torch.testing.assert_close(normal.matrix, rows.T @ (weight.reshape(-1, 1) * rows), rtol=1e-6, atol=1e-10)
    # half the sum of SciPy's squares is f, and its gradient is f's
    assert 0.5 * float(fun @ fun) == pytest.approx(found[0], rel=1e-12)
    np.testing.assert_allclose(jac.T @ fun, found[1].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(by_products[0], found[1].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(by_products[1], jac @ v.numpy(), rtol=1e-9, atol=1e-12)


class Decay(nn.Module):
    """Three parameters, as in SciPy's tutorial on robust regression."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(1.0, dtype=torch.float64)) for _ in "abc")

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.a + self.b * torch.exp(self.c * t)


@pytest.mark.sampled
@ROBUST_LOSSES
@pytest.mark.parametrize("weighted", [False, True])
def test_the_minimum_is_scipys(loss: str, weighted: bool) -> None:
    random = np.random.default_rng(1)
    t = np.linspace(0.0, 10.0, 60)
    y = 0.5 + 2.0 * np.exp(-t) + 0.05 * random.standard_normal(60)
    y[random.choice(60, 6, replace=False)] += 3.0
    weights = random.random(60) + 0.1 if weighted else np.ones(60)
    root, scale = np.sqrt(weights), 0.1

    def rho(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:  # of weighted squares, whose scale is weighted, too
        u = torch.from_numpy(np.sqrt(z / weights) / scale)
        robust = ROBUST[loss]
        bend = (robust.curvature(u) - robust.slope(u)) / (2 * u**2 + 1e-300)
        rows = [weights * scale**2 * robust.value(u).numpy(), robust.slope(u).numpy()]
        return np.stack([*rows, bend.numpy() / (weights * scale**2)])

    start = np.array([0.6, 1.8, -0.9])  # from further away arctan has another minimum
    options: Any = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 2000}
    theirs = least_squares(lambda p: root * (p[0] + p[1] * np.exp(p[2] * t) - y), start, loss=rho, **options)
    module = Decay()
    for parameter, value in zip(module.parameters(), start, strict=True):
        parameter.data.fill_(value)
    inputs, targets = torch.from_numpy(t), torch.from_numpy(y)
    terms = {"data": Term(residual=difference, loss=loss, scale=scale)}
    with BatchOptimizer(module, terms=terms, optimizer="lm", parallelize=1) as opt:
        batch = {"data": (Weighted(inputs, weights) if weighted else inputs, targets)}
        opt.step(batch)
        assert opt.output == pytest.approx(2 * theirs.cost / weights.sum(), rel=1e-8)
        np.testing.assert_allclose(opt.parameters.numpy(), theirs.x, rtol=2e-4)
        opt.load(batch)
        squares = opt.objective().least_squares()
        again = least_squares(squares.fun, start, jac=squares.jac, **options)
        assert again.cost == pytest.approx(opt.output, rel=1e-8)


@ROBUST_LOSSES
def test_at_any_magnitude(loss: str) -> None:
    u = torch.tensor([0.0, 1e-9, 0.5, 3.0, 1e8, 1e150], dtype=torch.float64, requires_grad=True)
    robust, squares = ROBUST[loss], MeanSquare(difference, loss=loss)
    value = robust.value(u)
    assert bool(value.isfinite().all()) and bool((value.diff() >= 0).all())
    (slope,) = torch.autograd.grad(value.sum(), u, create_graph=True)
    torch.testing.assert_close(slope / 2, robust.slope(u) * u, rtol=1e-12, atol=1e-300)
    assert bool(robust.curvature(u).isfinite().all())
    roots, slopes = squares.roots(u.detach())
    torch.testing.assert_close(roots.square(), value.detach(), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(roots * slopes, slope.detach() / 2, rtol=1e-9, atol=1e-200)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{"geodesic": True}, {"dense": 0}])
def test_geodesic_steps_and_products_without_a_matrix(options: dict[str, Any]) -> None:
    module = network()
    optimizer = LevenbergMarquardt(module.parameters(), max_iter=30, **options)
    terms = {"data": Term(residual=difference, loss="cauchy", scale=0.5)}
    with BatchOptimizer(module, terms=terms, optimizer=optimizer) as opt:
        opt.load({"data": (Weighted(X, W), Y)})
        before = opt.evaluate().item()
        assert opt.step({"data": (Weighted(X, W), Y)}) < 0.5 * before


def test_a_residual_that_is_not_finite_is_named() -> None:
    targets = Y.clone()
    targets[11] = math.inf
    with loaded(
        network(), None, {"one": (Weighted(X, W), targets)}, terms={"one": Term(residual=difference, loss="cauchy")}
    ) as opt:
        with pytest.raises(NonFiniteError, match="11"):
            opt.evaluate()
