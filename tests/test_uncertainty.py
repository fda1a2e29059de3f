"""Errors of a fit: certified ones, SciPy's, those of closed forms; what is not determined; bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

from batchopt import LBFGS, BatchOptimizer, Penalty, Term, Weighted
from batchopt.extras.covariance import Covariance
from benchmarks.nist_problems import MODELS, read_problems

PROBLEMS = {problem.name: problem for problem in read_problems()}
EXACT = "Lanczos1"  # its squares sum up to 1.4e-25: the certified digits of its parameters add more


class Model(nn.Module):
    """A function of some numbers."""

    def __init__(self, function: Callable[..., torch.Tensor], *b: float) -> None:
        super().__init__()
        self.function = function
        self.b = nn.Parameter(torch.tensor(b, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.b)


def covariance(
    module: nn.Module,
    criterion: Any,
    x: Any,
    y: Any,
    kind: str | None = None,
    *,
    sigma: float | None = None,
) -> Covariance:
    """At the module's parameters, without a step."""
    with BatchOptimizer(module, criterion, optimizer=None) as opt:
        opt.load(x, y)
        return opt.covariance(kind, sigma=sigma)


# Least squares


@pytest.mark.rows
@pytest.mark.parametrize("name", PROBLEMS)
def test_standard_errors_are_those_that_nist_certifies(name: str) -> None:
    problem = PROBLEMS[name]
    found = covariance(Model(MODELS[name], *problem.certified.tolist()), nn.MSELoss(), problem.x, problem.y)
    factor = 1.0
    if name == EXACT:
        assert found.variance is not None
        factor = math.sqrt(problem.squares / found.freedom / found.variance)
    # 11 digits are certified, of parameters too; Bennett5 and Lanczos lose the most of them by their curvature
    torch.testing.assert_close(found.errors * factor, problem.deviations, rtol=1e-8, atol=0)
    assert found.freedom == len(problem.y) - len(problem.certified) and not found.singular


def decay(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * math.e ** (-b * x) + c


@pytest.mark.parametrize(("known", "reduction"), [(False, "mean"), (True, "sum")])
def test_weights_and_known_deviations_are_those_of_scipys_curve_fit(known: bool, reduction: str) -> None:
    random = np.random.default_rng(0)
    x = np.linspace(0, 4, 60)
    deviations = random.uniform(0.05, 0.2, 60)
    y = decay(x, 2.5, 1.3, 0.5) + deviations * random.standard_normal(60)
    best, expected = optimize.curve_fit(
        decay, x, y, (1, 1, 1), sigma=deviations, absolute_sigma=known, xtol=1e-12, ftol=1e-12
    )
    # SciPy's Jacobian is of finite differences
    found = covariance(
        Model(decay, *best),
        nn.MSELoss(reduction=reduction),
        Weighted(torch.tensor(x), torch.tensor(deviations**-2)),
        torch.tensor(y),
        sigma=1.0 if known else None,
    )
    np.testing.assert_allclose(found.matrix, expected, rtol=1e-5)
    assert found.distance < 1e-4


def test_terms_are_sums_with_weights_that_are_inverse_variances() -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(20, 2, generator=random, dtype=torch.float64)
    y = torch.randn(20, 1, generator=random, dtype=torch.float64)
    line = nn.Linear(2, 1, bias=False).double()

    def misfit(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return module(inputs) - targets  # type: ignore[no-any-return]

    def found(reduction: str) -> Covariance:
        terms = {
            name: Term(residual=misfit, weight=weight, reduction=reduction)
            for name, weight in (("one", 4.0), ("two", 0.25), ("none", 0.0))
        }
        with BatchOptimizer(line, terms=terms, optimizer="lm") as opt:
            opt.step({"one": (x[:12], y[:12]), "two": (x[12:], y[12:]), "none": (x, 1 + y)})
            return opt.covariance(sigma=1.0)

    weights = torch.tensor([4.0] * 12 + [0.25] * 8, dtype=torch.float64)
    expected = torch.linalg.inv(x.T @ (weights[:, None] * x))
    torch.testing.assert_close(found("sum").matrix, expected, rtol=1e-10, atol=0.0)
    with pytest.raises(ValueError, match=r"sum of means over the samples of \['one', 'two'\]"):
        found("mean")


# Likelihoods


class Regression(nn.Module):
    """A linear predictor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


X = torch.randn(400, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * torch.tensor(
    [1.0, 10.0, 0.1]
)
UNIFORM = torch.rand(400, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
PREDICTOR = X @ torch.tensor([0.5, -0.05, 4.0], dtype=torch.float64)
CLICKED = (UNIFORM < PREDICTOR.sigmoid()).double()
COUNTED = torch.tensor(stats.poisson.ppf(UNIFORM, PREDICTOR.exp()))


def fitted(criterion: Any, y: torch.Tensor, kind: str | None) -> tuple[Covariance, torch.Tensor]:
    """At the maximum, with the linear predictor there."""
    model = Regression(3)

    def optimizer(params: Any) -> LBFGS:
        return LBFGS(params, max_iter=200, tolerance_grad=1e-11, tolerance_change=0.0)

    with BatchOptimizer(model, criterion, optimizer=optimizer) as opt:
        opt.step(X, y)
        return opt.covariance(kind), (X @ model.weight).detach()


def information(weights: torch.Tensor) -> torch.Tensor:
    return X.T @ (weights[:, None] * X)


@pytest.mark.rows
@pytest.mark.parametrize("kind", ["likelihood", "sandwich"])
@pytest.mark.parametrize("model", ["logistic", "poisson"])
def test_regressions_have_the_errors_of_their_closed_forms(model: str, kind: str) -> None:
    criteria = {"logistic": nn.BCEWithLogitsLoss(), "poisson": nn.PoissonNLLLoss(reduction="sum")}
    y = CLICKED if model == "logistic" else COUNTED
    found, predictor = fitted(criteria[model], y, kind if kind == "sandwich" else None)
    mean = predictor.sigmoid() if model == "logistic" else predictor.exp()
    inverse = torch.linalg.inv(information(mean * (1 - mean) if model == "logistic" else mean))  # Fisher's
    if kind == "sandwich":  # HC0
        inverse = inverse @ information((y - mean).square()) @ inverse
    torch.testing.assert_close(found.matrix, inverse, rtol=1e-9, atol=0.0)
    assert found.kind == kind and found.distance < 1e-6 and found.freedom == math.inf
    low = found.summary(level=0.9).rows[0].low
    assert low == pytest.approx(float(found.values[0]) - 1.6448536269514722 * float(inverse[0, 0].sqrt()))


TOKENS = torch.randint(-1, 3, (50, 4), generator=torch.Generator().manual_seed(5))


class Renamed(nn.BCEWithLogitsLoss):
    """One of torch's, by another name."""


CLASSES = partial(nn.CrossEntropyLoss, torch.tensor([1.0, 2.0, 0.5]).double())
IGNORING = partial(nn.CrossEntropyLoss, ignore_index=-1)
MEANS: dict[str, tuple[Callable[..., nn.Module], torch.Tensor]] = {
    "elements": (Renamed, (TOKENS[:, :3] > 0).double()),
    "classes": (CLASSES, TOKENS[:, 0].clamp(min=0)),
    "ignored": (IGNORING, TOKENS[:, 0]),
    "positions of classes": (CLASSES, TOKENS.clamp(min=0)),
    "positions that are ignored": (IGNORING, TOKENS),
}


class Outputs(nn.Module):
    """Linear, of the shape that the targets need."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions, self.linear = positions, nn.Linear(2, 3, bias=False).double()
        nn.init.constant_(self.linear.weight, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out[..., None] * torch.linspace(1, 2, self.positions, dtype=torch.float64) if self.positions else out


def ratios(module: Any) -> torch.Tensor:
    """Of the odds of classes, which do not change if the same is added to all of them: a singular direction."""
    found: torch.Tensor = module.linear.weight[1:] - module.linear.weight[:1]
    return found


@pytest.mark.rows
@pytest.mark.parametrize("kind", ["likelihood", "sandwich", "weighted"])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_and_a_sum_have_the_same_errors(name: str, kind: str) -> None:
    make, y = MEANS[name]
    x: Any = torch.randn(50, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    if kind == "weighted":
        kind, x = "likelihood", Weighted(x, torch.linspace(0.5, 3, 50))
    positions = 4 if name.startswith("positions") else 0
    criteria = make(), nn.BCEWithLogitsLoss(reduction="sum") if make is Renamed else make(reduction="sum")
    one, two = (covariance(Outputs(positions), c, x, y, kind) for c in criteria)
    torch.testing.assert_close(one.of(ratios).matrix, two.of(ratios).matrix, rtol=1e-10, atol=1e-12)
    if kind != "likelihood" or make is CLASSES or isinstance(x, Weighted):
        assert one.likelihood is two.likelihood is None
    else:
        assert one.likelihood is not None and one.likelihood == pytest.approx(two.likelihood)


@pytest.mark.parametrize("kind", ["likelihood", "sandwich"])
def test_denominators_count_what_they_say(kind: str) -> None:
    x = torch.randn(50, 4, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    y = torch.where(torch.arange(4) == 0, TOKENS.clamp(min=0), TOKENS)  # each sample has a token
    model, found = Outputs(0), []
    for reduction in ("mean", "sum"):
        criterion = nn.CrossEntropyLoss(ignore_index=-1, reduction=reduction)

        def loss_fn(module: nn.Module, x: torch.Tensor, y: torch.Tensor, criterion: Any = criterion) -> torch.Tensor:
            return criterion(module(x).transpose(1, 2), y)  # type: ignore[no-any-return]

        counts = {"mean": lambda _, y: (y >= 0).sum(1), "sum": None}[reduction]
        with BatchOptimizer(
            model, loss_fn=loss_fn, reduction=reduction, denominators=counts, optimizer=None, chunk_size=7
        ) as opt:
            opt.load(x, y)
            found.append(opt.covariance(kind).of(ratios).matrix)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_the_sandwich_of_terms_and_of_robust_losses_has_their_weights_and_slopes(loss: str) -> None:
    x, y = X[:80, :2], PREDICTOR[:80] + UNIFORM[:80] * X[:80, 0]
    terms = {
        name: Term(residual=lambda module, x, y: module(x) - y, weight=weight, reduction="sum", loss=loss, scale=0.3)
        for name, weight in (("one", 2.0), ("two", 0.5))
    }
    model = Regression(2)
    with BatchOptimizer(model, terms=terms, optimizer="lm") as opt:
        opt.step({"one": (x[:30], y[:30]), "two": (x[30:], y[30:])})
        found = opt.covariance("sandwich")
    w = torch.tensor([2.0] * 30 + [0.5] * 50, dtype=torch.float64)
    r = (x @ model.weight).detach() - y
    inside = r.abs() <= 0.3 if loss == "huber" else r.isfinite()
    slope = w * (r.clamp(-0.3, 0.3) if loss == "huber" else r)
    inverse = torch.linalg.inv(x.T @ ((w * inside)[:, None] * x))
    expected = inverse @ (x.T @ (slope.square()[:, None] * x)) @ inverse
    torch.testing.assert_close(found.matrix, expected, rtol=1e-10, atol=0.0)


# What is not determined


class Sum(nn.Module):
    """Two parameters that appear as their sum, one that f does not depend on, and one by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(value, dtype=dtype)) for value in (1.0, 2.0, 3.0))
        self.unused = nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b) * x + self.c


@pytest.mark.rows
@pytest.mark.parametrize("kind", ["least squares", "likelihood", "sandwich"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_directions_are_named_and_what_they_leave_alone_has_errors(kind: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 2, 12, dtype=dtype)
    model = Sum(dtype)
    with BatchOptimizer(model, nn.MSELoss(reduction="sum"), optimizer="lm") as opt:
        opt.step(x, x.sin())
        found = opt.covariance(kind)
    named = [set(direction.parts) for direction in found.singular]
    assert named == [{"a", "b"}, {"unused[0]"}, {"unused[1]"}]
    (direction,) = (one for one in found.singular if "a" in one.parts)
    assert direction.parts["a"] == pytest.approx(-direction.parts["b"]) and abs(direction.eigenvalue) < 1e-6
    errors = dict(zip(found.names, found.errors.tolist(), strict=True))
    assert found.summary().rows[0].name == "a" and math.isnan(found.summary().rows[0].p)
    assert math.isinf(errors["a"]) and math.isinf(errors["b"]) and math.isinf(errors["unused[1]"])
    together = found.of(lambda module: torch.stack([module.a + module.b, module.c, module.a]))
    design = torch.stack([x, torch.ones_like(x)], 1).double()
    inverse = torch.linalg.inv(design.T @ design)
    r = x.double().sin() - design @ together.value[:2]
    expected = {
        "least squares": inverse * r.square().sum() / 10,
        "likelihood": inverse / 2,
        "sandwich": inverse @ (design.T @ (r.square()[:, None] * design)) @ inverse,
    }[kind]
    torch.testing.assert_close(together.matrix[:2, :2], expected, rtol=1e-4 if dtype is torch.float32 else 1e-8, atol=0)
    assert math.isinf(together.error[2]) and math.isnan(together.matrix[0, 2])
    assert found.freedom == (10 if kind == "least squares" else math.inf)
    text = str(found.summary())
    assert "not determined by the data" in text and "0.707 a - 0.707 b" in text


class Absorbing(nn.Module):
    """Coefficients of given functions, and weights of powers, each twice, which may be able to replace these."""

    def __init__(self, functions: torch.Tensor, powers: torch.Tensor) -> None:
        super().__init__()
        self.functions, self.powers = functions, torch.cat([powers, powers], 1)
        self.coefficients = nn.Parameter(torch.ones(functions.shape[1], dtype=torch.float64))
        self.weights = nn.Parameter(torch.zeros(self.powers.shape[1], dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.functions[rows] @ self.coefficients + self.powers[rows] @ self.weights


@pytest.mark.parametrize("degree", [7, 15])
def test_some_parameters_have_the_inverse_of_the_schur_complement_or_are_absorbed(degree: int) -> None:
    x = np.linspace(0, 1, 60)
    basis = np.polynomial.legendre.legvander(2 * x - 1, degree)
    powers = x[:, None] ** np.arange(degree + 1)
    known = np.stack([np.sin(150 * x), np.random.default_rng(0).choice([-1.0, 1.0], 60) * x], 1)
    absorbed = basis[:, [5, 6, 7] if degree == 7 else [5, 7, 9]]  # by weights that are large and cancel
    model = Absorbing(torch.tensor(np.concatenate([known, absorbed], 1)), torch.tensor(powers))
    found = covariance(model, nn.MSELoss(), torch.arange(60), torch.zeros(60), sigma=1.0)
    of = found.of(lambda module: module.coefficients)
    assert ("directions are not determined" in str(found.summary())) == (found.curvature.singular > 20) == (degree > 7)
    assert of.error[2:].isinf().all() and of.matrix[0, 2:].isnan().all()
    if degree == 7:  # otherwise float64 has no normal matrix of all powers
        rest = known - basis @ np.linalg.lstsq(basis, known, rcond=None)[0]
        np.testing.assert_allclose(of.matrix[:2, :2], np.linalg.inv(known.T @ rest), rtol=1e-6)


def test_a_saddle_is_refused_with_its_eigenvalue_and_direction() -> None:
    model = Model(lambda x, a, b: (a - b + x) ** 2 / 2 - (a + b) ** 2, 0.0, 0.0)
    x = torch.zeros(5, dtype=torch.float64)
    with BatchOptimizer(model, loss_fn=lambda module, x, _: module(x).mean(), optimizer=None) as opt:
        opt.load(x)
        with pytest.raises(
            ValueError, match=r"X is no minimum of f: .* eigenvalue -4 along 0.707 b\[\d\] \+ 0.707 b\["
        ):
            opt.covariance()


def test_away_from_a_minimum_the_summary_says_so() -> None:
    x = torch.linspace(0, 1, 30, dtype=torch.float64)
    model = Model(lambda x, a, b: a * x + b, 5.0, 0.0)
    found = covariance(model, nn.MSELoss(), x, x.sin())
    assert found.distance > 2 and "X IS NOT AT A MINIMUM" in str(found.summary())


# Functions of parameters, and what is frozen


def test_a_function_has_the_errors_of_the_delta_method_at_the_parameters_of_the_fit() -> None:
    x = torch.linspace(0, 1, 30, dtype=torch.float64)
    model = Model(lambda x, a, b: a * torch.exp(-b * x), 1.0, 1.0)
    with BatchOptimizer(model, nn.MSELoss(), optimizer="lm") as opt:
        opt.step(x, 2 / (1 + x))
        found = opt.covariance()
    a, b = found.values.tolist()
    nn.init.zeros_(model.b)
    half = found.of(lambda module: (math.log(2) / module.b[1]).reshape(1, 1))
    assert half.value.item() == pytest.approx(math.log(2) / b) and half.value.shape == half.error.shape == (1, 1)
    assert half.error.item() == pytest.approx(math.log(2) / b**2 * float(found.errors[1]))
    several = found.of(lambda module: torch.cat([module(x[:3]), module.b]))
    rows = torch.stack([torch.exp(-b * x[:3]), -a * x[:3] * torch.exp(-b * x[:3])], 1)
    rows = torch.cat([rows, torch.eye(2, dtype=torch.float64)])
    torch.testing.assert_close(several.matrix, rows @ found.matrix @ rows.T, rtol=1e-12, atol=1e-15)
    wrong: list[tuple[Any, type[Exception]]] = [
        (lambda module: 1.0, TypeError),
        (lambda module: module.b.detach(), ValueError),
    ]
    for function, error in wrong:
        with pytest.raises(error, match=r"`function\(module\)`"):
            found.of(function)


@pytest.mark.parametrize("kind", ["least squares", "likelihood", "sandwich"])
@pytest.mark.parametrize("before", [True, False])
def test_frozen_parameters_have_no_error_and_count_as_known(kind: str, before: bool) -> None:
    x = torch.linspace(0, 1, 30, dtype=torch.float64)

    def line() -> Any:
        return nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()

    torch.manual_seed(0)
    model = line()
    model[0].weight.requires_grad_(not before)
    with BatchOptimizer(model, nn.MSELoss(), optimizer=None) as opt:
        model[0].weight.requires_grad_(False)
        opt.load(x[:, None], x[:, None].sin())
        found = opt.covariance(kind, tolerance=1e-10 if kind == "least squares" else 10.0)
    assert found.names == ("0.bias[0]", "0.bias[1]", "2.weight[0, 0]", "2.weight[0, 1]")
    assert found.values.tolist() == [*model[0].bias.tolist(), *model[2].weight.flatten().tolist()]


def test_complex_parameters_have_real_and_imaginary_parts() -> None:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
            self.c = nn.Parameter(torch.tensor(1 + 2j, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c.real * x[:, 0] + self.c.imag * x[:, 1] + self.shift

    model = Complex()
    with BatchOptimizer(model, nn.MSELoss(), optimizer="lm") as opt:
        opt.step(x, x.sum(1) + x[:, 0] ** 2)
        found = opt.covariance()
        with pytest.raises(ValueError, match="real parameters"):
            opt.covariance("sandwich")
    design = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    assert found.names == ("c.real", "c.imag", "shift") and found.variance is not None
    torch.testing.assert_close(
        found.matrix, found.variance * torch.linalg.inv(design.T @ design), rtol=1e-9, atol=1e-15
    )
    torch.testing.assert_close(found.of(lambda module: torch.view_as_real(module.c)).matrix, found.matrix[:2, :2])


# Precision, workers, words


def test_in_single_precision_the_digits_that_are_left_are_right() -> None:
    x = torch.linspace(1, 2, 50, dtype=torch.float64)
    y = 2 * torch.exp(-0.3 * x) + 0.5 + 0.01 * torch.sin(40 * x)
    errors, digits = [], []
    with BatchOptimizer(Model(decay, 2.0, 0.3, 0.5), nn.MSELoss(), optimizer="lm") as opt:
        opt.step(x, y)
        at = opt.parameters.clone()
    for dtype in (torch.float64, torch.float32):
        found = covariance(Model(decay, *at.tolist()).to(dtype), nn.MSELoss(), x.to(dtype), y.to(dtype))
        errors.append(found.errors)
        digits.append(found.digits)
        assert ("rounding leaves" in str(found.summary())) == (found.digits < 3)
    assert digits[0] > 7 > digits[1]
    torch.testing.assert_close(errors[1], errors[0], rtol=10.0 ** -digits[1], atol=0.0)


def test_a_summary_is_a_table_and_plain_data() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    model = Model(lambda x, a, b: a * x + b, 0.0, 0.0)
    with BatchOptimizer(model, nn.MSELoss(), optimizer="lm") as opt:
        opt.step(x, torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64))
        found = opt.covariance()
    # by hand: slope 1.4, intercept -0.1, residuals 0.1, -0.3, 0.3, -0.1, whose squares sum up to 0.2
    summary = found.summary(["slope", "start"])
    assert [row.name for row in summary.rows] == ["slope", "start"] and summary.freedom == 2
    assert summary.variance == pytest.approx(0.1)
    assert summary.rows[0].error == pytest.approx(math.sqrt(0.1 / 5))
    half = float(stats.t.ppf(0.975, 2)) * math.sqrt(0.1 / 5)
    assert (summary.rows[0].low, summary.rows[0].high) == pytest.approx((1.4 - half, 1.4 + half))
    ((one, two, correlation),) = summary.correlations
    assert (one, two) == ("slope", "start") and correlation == pytest.approx(-1.5 / math.sqrt(3.5))
    lines = str(summary).splitlines()
    assert "independent, with mean 0 and one variance, which is estimated" in " ".join(lines[:2])
    assert "residual variance 0.1 (standard deviation 0.316228), 2 degrees of freedom" in lines
    row = next(line for line in lines if line.startswith("slope"))
    assert row.split() == ["slope", "1.4", "0.14142", "0.791513", "2.00849", "9.899", "0.01"]
    assert summary.rows[0].p == pytest.approx(2 * float(stats.t.sf(1.4 / math.sqrt(0.02), 2)))
    assert lines[-1] == "  slope, start: -0.8018" and repr(found) == "Covariance(least squares, 2 parameters)"
    with pytest.raises(ValueError, match="`names` must have one for each of 2 parameters; got 1"):
        found.summary(["slope"])
    with pytest.raises(ValueError, match=r"`level` must be between 0 and 1, such as 0\.95; got 95"):
        found.summary(level=95)


# Likelihoods, and tests of 0


def of_normal(y: np.ndarray, mean: np.ndarray, variances: Any) -> float:
    """The logarithm of the density of independent normal numbers."""
    return float(-0.5 * (np.log(2 * np.pi * variances) + (y - mean) ** 2 / variances).sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sigma", [None, 0.7])
def test_the_likelihood_of_least_squares_is_the_normal_density_at_the_most_likely_variance(
    weighted: bool, sigma: float | None
) -> None:
    design, y = X.numpy(), (PREDICTOR + UNIFORM).numpy()
    w = np.linspace(0.5, 3.0, 400) if weighted else np.ones(400)
    w[:7] = 0.0 if weighted else 1.0  # of which nothing is known
    best = np.linalg.solve(design.T @ (w[:, None] * design), design.T @ (w * y))
    model = Regression(3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(best))
    x = Weighted(X, torch.tensor(w)) if weighted else X
    found = covariance(model, nn.MSELoss(), x, torch.tensor(y), sigma=sigma).likelihood
    assert found is not None
    on = w > 0
    squares = (w * (y - design @ best) ** 2).sum()
    variance = squares / on.sum() if sigma is None else sigma**2
    assert found.value == pytest.approx(of_normal(y[on], design[on] @ best, variance / w[on]))
    assert (found.n, found.k) == (int(on.sum()), 4 if sigma is None else 3)
    assert found.aic == pytest.approx(2 * found.k - 2 * found.value)
    assert found.bic == pytest.approx(found.k * math.log(found.n) - 2 * found.value)


def test_the_likelihood_of_terms_has_their_variances_and_not_what_is_undetermined() -> None:
    x, y = X[:50, 0], PREDICTOR[:50] + UNIFORM[:50]
    terms = {
        name: Term(residual=lambda module, x, y: module(x) - y, weight=1 / variance, reduction="sum")
        for name, variance in (("one", 0.25), ("two", 4.0))
    }
    with BatchOptimizer(Sum(torch.float64), terms=terms, optimizer="lm") as opt:
        opt.step({"one": (x[:30], y[:30]), "two": (x[30:], y[30:])})
        found, at = opt.covariance(sigma=1.0).likelihood, opt.module(x).detach().numpy()
    assert found is not None and (found.n, found.k) == (50, 2)  # a + b, and c
    assert found.value == pytest.approx(of_normal(y.numpy(), at, np.array([0.25] * 30 + [4.0] * 20)))


def test_a_logistic_regression_has_its_likelihood_and_tests_by_the_normal_distribution() -> None:
    found, predictor = fitted(nn.BCEWithLogitsLoss(), CLICKED, None)
    p, y = 1 / (1 + np.exp(-predictor.numpy())), CLICKED.numpy()
    assert found.likelihood is not None and (found.likelihood.n, found.likelihood.k) == (400, 3)
    assert found.likelihood.value == pytest.approx(float((y * np.log(p) + (1 - y) * np.log(1 - p)).sum()))
    summary = found.summary()
    assert summary.likelihood == found.likelihood and "compare them with those of the same loss" in summary.text
    for row, value, error in zip(summary.rows, found.values.tolist(), found.errors.tolist(), strict=True):
        assert row.z == pytest.approx(value / error)
        assert row.p == pytest.approx(2 * float(stats.norm.sf(abs(value) / error)))


def test_what_has_no_likelihood_says_none() -> None:
    y = CLICKED[:, None]
    term = Term(lambda module, x, y: (module(x)[:, None] - y).square().sum(), reduction="sum")
    robust = Term(residual=lambda module, x, y: module(x)[:, None] - y, reduction="sum", loss="huber")
    squares = Term(residual=lambda module, x, y: module(x)[:, None] - y, reduction="sum")
    prior = Penalty(lambda module: module.weight.square().sum())
    cases: list[tuple[dict[str, Term | Penalty], Any, str]] = [
        ({"data": term}, X, "sandwich"),
        ({"data": robust}, X, "likelihood"),
        ({"data": term, "prior": prior}, X, "likelihood"),
        ({"data": squares}, Weighted(X, UNIFORM), "likelihood"),
    ]
    for terms, x, kind in cases:
        with BatchOptimizer(Regression(3), terms=terms, optimizer=None) as opt:
            opt.load({"data": (x, y)})
            found = opt.covariance(kind)
        assert found.likelihood is None and "AIC" not in str(found.summary())


class Centred(nn.Module):
    """Subtracts the mean of a chunk."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()


LINE = torch.ones(5, 1, dtype=torch.float64)
REFUSED: dict[str, tuple[dict[str, Any], str | None, tuple[Any, Any], str]] = {
    "robust": (
        {"terms": {"a": Term(residual=lambda module, x, y: module(x) - y, loss="huber")}},
        None,
        ({"a": (LINE, LINE)}, None),
        "a robust loss is no sum of squares",
    ),
    "weights": ({"criterion": nn.MSELoss()}, "sandwich", (Weighted(LINE, torch.ones(5)), LINE), "without weights"),
    "list": ({"criterion": nn.MSELoss()}, "sandwich", ([*LINE], [*LINE]), "rows of tensors"),
    "penalty": (
        {
            "terms": {
                "a": Term(residual=lambda module, x, y: module(x) - y, reduction="sum"),
                "b": Penalty(lambda module: module.weight.sum()),
            }
        },
        "sandwich",
        ({"a": (LINE, LINE)}, None),
        "a Penalty has none",
    ),
    "lengths": ({"criterion": nn.CTCLoss()}, None, (LINE, LINE), "CTCLoss divides by the lengths"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_errors_is_refused(case: str) -> None:
    given, kind, (data, targets), words = REFUSED[case]
    line = nn.Linear(1, 1).double()
    with BatchOptimizer(line, **given, optimizer=None) as opt:
        opt.load(data, targets)
        with pytest.raises(ValueError, match=words):
            opt.covariance(kind)


@pytest.mark.parametrize(
    ("layer", "words"),
    [(nn.BatchNorm1d(1), "cannot differentiate the loss of single samples"), (Centred(), "do not sum up to df/dX")],
)
def test_samples_that_depend_on_each_other_have_no_scores(layer: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Linear(3, 1), layer, nn.Softplus()).double()
    with BatchOptimizer(model, nn.MSELoss(), optimizer=None) as opt:
        opt.load(X, CLICKED[:, None])
        with pytest.raises(ValueError, match=f"{words}; kind='sandwich' needs samples whose loss"):
            opt.covariance("sandwich", tolerance=100.0)


def test_second_derivatives_that_are_no_numbers_are_an_error_that_names_where() -> None:
    module = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 0.0]]))

    def loss(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (module.weight.abs() ** 1.5).sum() + 0 * x.sum()
        return found

    with BatchOptimizer(module, loss_fn=loss, reduction="sum", on_nonfinite="return") as opt:
        opt.load(torch.ones(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"not finite for elements \[.*1\] of X"):
            opt.covariance("likelihood")


def test_one_sample_has_no_criterion_by_the_number_of_samples() -> None:
    line = nn.Linear(1, 1, bias=False).double()
    x = torch.linspace(0, 1, 30).double()[None, :, None]
    y = 2 * x + 0.1 * torch.sin(40 * x)
    with BatchOptimizer(line, loss_fn=lambda net, x, y: (net(x) - y).square().sum() / 2, reduction="sum") as opt:
        opt.step(x, y)
        found = opt.covariance()
    assert found.likelihood is not None and math.isnan(found.likelihood.bic) and math.isfinite(found.likelihood.aic)
    assert "one sample, which the model describes" in str(found.summary()).replace("\n", " ")
