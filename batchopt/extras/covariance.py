"""The covariance of fitted parameters: standard errors, those of functions of them, and what is not determined."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from batchopt.extending import Bound, reals

# The fraction of a standard error that a Newton step may have where X counts as the minimum.
NEAR = 0.1
# The part of the variance of a function that directions which are not determined may add.
UNKNOWN = 0.01
LINES, PARTS = 20, 6  # correlations or directions, and components of a direction, in a table


class Direction(NamedTuple):
    """A direction along which f does not determine the parameters, or has no minimum: the `eigenvalue` of the matrix
    scaled to a unit diagonal, and the component of each parameter that takes part, by name, the largest first."""

    eigenvalue: float
    parts: dict[str, float]

    def __str__(self) -> str:
        terms = [f"{'-' if part < 0 else '+'} {abs(part):.3f} {name}" for name, part in self.parts.items()]
        more = f" and {len(terms) - PARTS} more" if len(terms) > PARTS else ""
        return " ".join(terms[:PARTS]).removeprefix("+ ") + more


@dataclass(frozen=True)
class Curvature:
    """A symmetric matrix, scaled to a unit diagonal by the roots `scale` of its own: its `eigenvalues` in ascending
    order, with `eigenvectors` as columns, of which the first `singular` are at most the tolerance. `error`: the
    relative error of the next one by rounding; `rounding`: that of an eigenvalue that is 0."""

    scale: torch.Tensor
    eigenvalues: torch.Tensor
    eigenvectors: torch.Tensor
    singular: int
    error: float
    rounding: float

    @classmethod
    def of(cls, matrix: torch.Tensor, tolerance: float | None, sums: float, rows: float) -> Curvature:
        """Decompose a matrix whose elements have the error `sums`, relative to the diagonal, and those of which it is
        the product the error `rows`. Both change an eigenvalue by at most 2 rows √λ + rows² + sums, by Weyl's bound for
        singular values; so no more than the last two are known of one that is 0, which is the default tolerance."""
        if not bool(matrix.isfinite().all()):
            bad = (~matrix.isfinite()).any(0).nonzero()[:, 0].tolist()
            raise ValueError(
                f"the matrix is not finite for elements {bad[:10]} of X{' and others' * (len(bad) > 10)}: f has no "
                "second derivatives there, or they overflow; fit in other units, or freeze these parameters"
            )
        scale = matrix.diagonal().abs().sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        values, vectors = torch.linalg.eigh(matrix / scale[:, None] / scale)
        rounding = sums + rows**2
        singular = int((values <= (rounding if tolerance is None else tolerance)).sum())
        least = float(values[singular]) if singular < len(values) else 0.0
        error = sums / least + 2 * rows / math.sqrt(least) if least else 1.0
        return cls(scale, values, vectors, singular, error, rounding)

    @property
    def inverse(self) -> torch.Tensor:
        """The inverse on the directions that are not singular: a pseudoinverse of the scaled matrix."""
        vectors = self.eigenvectors[:, self.singular :] / self.scale[:, None]
        found: torch.Tensor = (vectors / self.eigenvalues[self.singular :]) @ vectors.T
        return found

    @property
    def threshold(self) -> float:
        """The component along singular directions up to which it may be rounding, which turns eigenvectors by the
        error relative to the gap (Davis and Kahan); at most a hundredth."""
        return min(self.error, 0.01)

    def determines(self, rows: torch.Tensor) -> torch.Tensor:
        """Tell for each linear function of the parameters, a row, whether singular directions leave it alone: whether
        they add less than a hundredth to its variance, with no eigenvalue below the rounding of 0."""
        variances = (rows / self.scale @ self.eigenvectors).square() / self.eigenvalues.clamp(min=self.rounding)
        found: torch.Tensor = variances[:, : self.singular].sum(1) <= UNKNOWN * variances[:, self.singular :].sum(1)
        return found

    def directions(self, names: Sequence[str]) -> tuple[Direction, ...]:
        """Return the singular directions, in the basis of Gauss and Jordan's elimination: each has a parameter that no
        other one has, so that few take part."""
        values, vectors = self.eigenvalues[: self.singular], self.eigenvectors[:, : self.singular]
        basis = vectors.clone()
        for column in range(self.singular):
            pivot, other = divmod(int(basis[:, column:].abs().argmax()), self.singular - column)
            basis[:, [column, column + other]] = basis[:, [column + other, column]]
            one = basis[:, column] / basis[pivot, column]
            basis -= one.outer(basis[pivot])
            basis[:, column] = one
        basis /= basis.norm(dim=0)
        found = [self.direction(one, float((vectors.T @ one).square() @ values), names) for one in basis.T]
        return tuple(sorted(found, key=lambda one: names.index(next(iter(one.parts)))))

    def direction(self, vector: torch.Tensor, eigenvalue: float, names: Sequence[str]) -> Direction:
        """Return a direction without the components that may be rounding."""
        components = vector.tolist()
        order = sorted(range(len(components)), key=lambda i: -round(abs(components[i]), 3))
        sign = math.copysign(1.0, components[order[0]])
        least = min(max(self.threshold, 1e-6), abs(components[order[0]]))
        return Direction(eigenvalue, {names[i]: sign * components[i] for i in order if abs(components[i]) >= least})


class Row(NamedTuple):
    """A parameter in a table: its value, its standard error and its interval; `z`, the value divided by the error, and
    `p`, the probability of one so far from 0 if the parameter is 0. Both are NaN where the error is infinite."""

    name: str
    value: float
    error: float
    low: float
    high: float
    z: float
    p: float


class Likelihood(NamedTuple):
    """The likelihood of a fit: `n` residuals, or samples, its logarithm `value`, of f as a likelihood without constants
    that f leaves out, and the number `k` of parameters that are determined, with the variance if it was estimated."""

    n: int
    value: float
    k: int

    @property
    def aic(self) -> float:
        """Akaike's criterion, 2 k - 2 l: of fits of the same data, the least is the best."""
        return 2 * self.k - 2 * self.value

    @property
    def bic(self) -> float:
        """Schwarz's criterion, k log n - 2 l; NaN for one sample, whose parts are no independent ones."""
        return self.k * math.log(self.n) - 2 * self.value if self.n > 1 else math.nan


class Summary(NamedTuple):
    """A table of the parameters: `rows`, the pairs with large `correlations`, the degrees of `freedom` (infinity where
    intervals are normal), the `variance` of a residual where it was estimated, all as `text`, which `print` shows, and
    the `likelihood` of the fit, where it has one."""

    rows: tuple[Row, ...]
    correlations: tuple[tuple[str, str, float], ...]
    freedom: float
    variance: float | None
    text: str
    likelihood: Likelihood | None

    def __repr__(self) -> str:
        return self.text


class Derived(NamedTuple):
    """A function of the parameters: its `value` and standard `error`, both in its shape, and the covariance `matrix` of
    its m outputs, shape `(m, m)`; float64."""

    value: torch.Tensor
    error: torch.Tensor
    matrix: torch.Tensor


@dataclass(frozen=True)
class Covariance:
    """The covariance of the fitted parameters at X, as `BatchOptimizer.covariance` found it.

    `kind`: "least squares", "likelihood" or "sandwich"; `assumes`: what it takes for granted, in words. `names` and
    `values` (float64, shape `(p,)`): of the numbers fitted, all of X but what is frozen. `freedom`: degrees of freedom
    of the estimated `variance` of a residual of weight 1; infinity and None where none was estimated. `distance`: the
    largest change of a parameter by a Newton step, in its standard errors; near 0 at a minimum. `curvature`: the matrix
    that was inverted. `likelihood`: None for the sandwich, robust losses, penalties, whose parameters are not free, and
    likelihoods whose samples or classes have weights.
    """

    kind: str
    assumes: str
    names: tuple[str, ...]
    values: torch.Tensor
    freedom: float
    variance: float | None
    distance: float
    curvature: Curvature
    _inverse: torch.Tensor
    _module: torch.nn.Module
    _parameters: Mapping[str, torch.Tensor]
    likelihood: Likelihood | None

    @property
    def matrix(self) -> torch.Tensor:
        """The covariance, float64, shape `(p, p)`; infinity and NaN in the rows and columns of parameters that f does
        not determine."""
        return self._marked(self._inverse.clone(), torch.eye(len(self.values), dtype=torch.float64))

    @property
    def errors(self) -> torch.Tensor:
        """The standard errors, float64, shape `(p,)`; infinity for parameters that f does not determine."""
        return self.matrix.diagonal().clamp(min=0).sqrt()

    @property
    def singular(self) -> tuple[Direction, ...]:
        """The directions that f does not determine."""
        return self.curvature.directions(self.names)

    @property
    def digits(self) -> int:
        """The number of digits of standard errors that rounding leaves at least, by the least curved direction."""
        return max(int(-math.log10(self.curvature.error)), 0)

    def _marked(self, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the covariance of linear functions, the rows, with those marked that are not determined."""
        unknown = ~self.curvature.determines(rows)
        matrix[unknown] = math.nan
        matrix[:, unknown] = math.nan
        matrix[unknown, unknown] = math.inf
        return matrix

    def of(self, function: Callable[[Any], torch.Tensor]) -> Derived:
        """Return the value and standard errors of `function(module)`, a tensor, by the delta method: with its Jacobian
        J, by a backward for each output, and the covariance C of the parameters, J C Jᵀ.

        The module is evaluated at the parameters of the fit, whatever became of them since. A function that singular
        directions leave alone has an error although its parameters have none. Raises `TypeError` or `ValueError` for
        anything but real numbers that depend on the parameters.

        >>> with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss(), optimizer="lm") as opt:
        ...     loss = opt.step(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [1.0], [3.0]]))
        ...     found = opt.covariance().of(lambda line: line(torch.tensor([[1.0], [5.0]])))
        >>> [f"{v:.3f} +- {e:.3f}" for v, e in zip(found.value[:, 0].tolist(), found.error[:, 0].tolist())]
        ['1.333 +- 0.236', '7.333 +- 1.179']
        """
        at = {f"module.{name}": value.clone().requires_grad_() for name, value in self._parameters.items()}
        with torch.enable_grad():
            value = torch.func.functional_call(Bound(self._module, function), at, ())
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            given = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"`function(module)` must return a tensor of real numbers; got {given}")
        if not value.requires_grad:
            advice = "look for .detach(), .item() or torch.no_grad()"
            raise ValueError(f"`function(module)` depends on no fitted parameter: {advice}")
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        rows = torch.stack([flat(torch.autograd.grad(output, [*at.values()], **options)) for output in value.flatten()])
        matrix = self._marked(rows @ self._inverse @ rows.T, rows)
        error = matrix.diagonal().clamp(min=0).sqrt().reshape(value.shape)
        return Derived(value.detach().to("cpu", torch.float64), error, matrix)

    def summary(self, names: Sequence[str] | None = None, level: float = 0.95, correlations: float = 0.5) -> Summary:
        """Return a table of values, standard errors, intervals and tests of 0, which `print` shows, and `rows` has as
        numbers.

        names: one for each parameter. Default: `names`. level: of the intervals, between 0 and 1; they and p are by
        Student's t where the variance was estimated, which needs SciPy, else normal. correlations: those from this size
        on are listed. Raises `ValueError` for other names and levels, `ImportError` without SciPy.
        """
        names, errors = self.names if names is None else tuple(names), self.errors
        if len(names) != len(self.values):
            raise ValueError(f"`names` must have one for each of {len(self.values)} parameters; got {len(names)}")
        if not 0 < level < 1:
            raise ValueError(f"`level` must be between 0 and 1, such as 0.95; got {level!r}")
        half = errors * _quantile(level, self.freedom)
        z = torch.where(errors.isinf(), math.nan, self.values / errors)
        given = self.values, errors, self.values - half, self.values + half, z, _tails(z, self.freedom)
        rows = tuple(Row(*row) for row in zip(names, *(column.tolist() for column in given), strict=True))
        table = (self.matrix / errors[:, None] / errors).triu(1)
        pairs = (table.abs() >= correlations).nonzero().tolist() if correlations > 0 else []
        large = sorted(((names[i], names[j], float(table[i, j])) for i, j in pairs), key=lambda pair: -abs(pair[2]))
        lines = [*self._head(), "", *_table(rows, level, self.freedom)]
        lines += ["", "largest correlations:"] if large else []
        lines += [f"  {one}, {two}: {found:+.4f}" for one, two, found in large[:LINES]]
        lines += [f"  and {len(large) - LINES} more"] if len(large) > LINES else []
        text = "\n".join([*lines, *self._notes(names)])
        return Summary(rows, tuple(large), self.freedom, self.variance, text, self.likelihood)

    def _head(self) -> list[str]:
        lines = textwrap.wrap(f"{self.kind}: {self.assumes}", 100)
        if self.variance is not None:
            deviation = f"standard deviation {math.sqrt(self.variance):.6g}"
            lines.append(f"residual variance {self.variance:.6g} ({deviation}), {self.freedom:g} degrees of freedom")
        if self.likelihood is not None:
            n, value, k = self.likelihood
            of = f"n = {n}, k = {k}{', with the variance' * (self.variance is not None)}"
            lines.append(
                f"log likelihood {value:.3f}, AIC {self.likelihood.aic:.3f}, BIC {self.likelihood.bic:.3f} ({of})"
            )
            if self.kind == "likelihood":
                lines.append(
                    "without constants that f leaves out: compare them with those of the same loss and data alone"
                )
        newton = f"a Newton step from here changes no parameter by more than {self.distance:.2g} standard errors"
        where = "" if self.distance <= NEAR else "X IS NOT AT A MINIMUM, which these errors are about: "
        return [*lines, where + newton]

    def _notes(self, names: Sequence[str]) -> list[str]:
        count = self.curvature.singular
        notes = [f"{count} directions are not determined by the data: `singular` names them"]
        if count <= LINES:
            found = self.curvature.directions(names)
            notes = [f"not determined by the data (eigenvalue {one.eigenvalue:.1e}): {one}" for one in found]
        if notes:
            notes = ["", *notes, "what takes part has an infinite error; a function of it may have a finite one: of()"]
        if self.digits < 3:
            notes += ["", f"rounding leaves {self.digits} digits of these errors at least: evaluate in float64"]
        return notes

    def __repr__(self) -> str:
        count = self.curvature.singular
        singular = f", {count} singular direction{'s' * (count > 1)}" if count else ""
        return f"Covariance({self.kind}, {len(self.values)} parameters{singular})"


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return them as one vector of real numbers, as in X."""
    return torch.cat([reals(tensor.detach()).flatten() for tensor in tensors]).to("cpu", torch.float64)


def _table(rows: Sequence[Row], level: float, freedom: float) -> list[str]:
    width, interval = max(len(row.name) for row in rows) + 2, f"{100 * level:g} % interval"
    lines = [
        f"{'':{width}}{'value':>14}{'std. error':>13}{interval:>28}{'z' if math.isinf(freedom) else 't':>10}{'p':>10}"
    ]
    for name, value, error, low, high, z, p in rows:
        lines.append(f"{name:{width}}{value:14.7g}{error:13.5g}{low:14.6g}{high:14.6g}{z:10.4g}{p:10.2g}")
    return lines


def _tails(z: torch.Tensor, freedom: float) -> torch.Tensor:
    """Return the probabilities of values further from 0, by Student's t or (infinite freedom) normal."""
    if math.isinf(freedom):
        return (z.abs() / math.sqrt(2)).erfc()
    return torch.as_tensor(2 * _students().stdtr(freedom, -z.abs().numpy()))


def _quantile(level: float, freedom: float) -> float:
    if math.isinf(freedom):
        return NormalDist().inv_cdf((1 + level) / 2)
    return float(_students().stdtrit(freedom, (1 + level) / 2))


def _students() -> Any:
    try:
        import scipy.special
    except ImportError as error:
        raise ImportError("intervals by Student's t need SciPy: pip install 'batchopt[scipy]'") from error
    return scipy.special
