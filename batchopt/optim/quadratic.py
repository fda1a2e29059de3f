"""The quadratic model of a sum of squares around a point: its damped minimum, by a factorisation or by products."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from batchopt.optim.algebra import largest, power_of_two
from batchopt.optim.spectrum import InBasis, Spectrum
from batchopt_workers.functions.least_squares import stripes
from batchopt_workers.functions.subspace import Cosines

# Conjugate gradients end when the residual is this fraction of the right-hand side, or after this many products.
ACCURACY, MOST = 1e-3, 250
# Below this damping a solution by rows is one of equations with their matrix alone, damped by as good as nothing.
LITTLE, LEAST = 1e-8, 1e-13


class Products(Protocol):
    """Provides products with JᵀWJ."""

    def gauss_newton(self, v: torch.Tensor) -> torch.Tensor:
        """Return JᵀWJ times `v`, shape `(n,)`."""


class Model(Protocol):
    """f(x + s) = f(x) + 2 sᵀ vector + sᵀ JᵀWJ s, and `scale`, the diagonal of D, by which steps are measured. All
    shapes `(n,)`, float64."""

    vector: torch.Tensor
    scale: torch.Tensor

    def minimum(self, damping: float) -> torch.Tensor | None:
        """Return the step to the minimum of the damped model; None as in `solve`."""

    def solve(self, right: torch.Tensor, damping: float, free: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return s with (JᵀWJ + damping D) s = right; None if the matrix is not numerically positive definite. `free`:
        1 for elements of s and rows of the matrix that are meant, 0 for those that are 0, as they are in `right`."""

    def times(self, v: torch.Tensor) -> torch.Tensor:
        """Return JᵀWJ times `v`."""

    def decrease(self, step: torch.Tensor) -> float:
        """Return the predicted decrease of f."""


class DenseModel:
    """The model with the matrix itself. `each`: the scale is the matrix's diagonal, at least `before`; else one number,
    fixed once. `again` sums over the rows once more, where that gains digits."""

    def __init__(
        self,
        vector: torch.Tensor,
        matrix: torch.Tensor,
        before: torch.Tensor | None,
        each: bool = True,
        again: InBasis | None = None,
    ) -> None:
        self.vector, self._matrix, self._again = vector, matrix, again
        diagonal = matrix.diagonal()
        if before is not None and not each:
            self.scale = before
        else:
            largest = float(diagonal.max()) or 1.0
            scale = diagonal if each else torch.full_like(diagonal, largest)
            # a parameter that has no effect does not move, whatever its scale
            scale = torch.where(scale > 0, scale, torch.full_like(scale, largest))
            self.scale = scale.clone() if before is None else torch.maximum(scale, before)
        self._roots = self.scale.sqrt()
        self._scaled = matrix / self._roots / self._roots[:, None]
        self._factors: tuple[float, torch.Tensor | None] = math.nan, None
        self._spectrum: Spectrum | None = None

    def minimum(self, damping: float) -> torch.Tensor | None:
        """See `Model`."""
        if self._spectrum is not None:
            return self._spectrum.minimum(damping) / self._roots
        return self.solve(-self.vector, damping)

    def solve(self, right: torch.Tensor, damping: float, free: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `Model`."""
        if self._spectrum is not None and free is None:
            return self._spectrum.solve(right / self._roots, damping) / self._roots
        if free is not None or self._factors[0] != damping:
            damped = self._scaled.clone() if free is None else self._scaled * free * free[:, None]
            damped.diagonal().add_(damping if free is None else damping * free + (1 - free))
            factor, info = torch.linalg.cholesky_ex(damped)
            self._factors = damping if free is None else math.nan, factor if int(info) == 0 else None
        factor = self._factors[1]
        if factor is None:
            return None
        found = torch.cholesky_solve((right / self._roots)[:, None], factor)[:, 0] / self._roots
        return found if bool(found.isfinite().all()) else None

    def times(self, v: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._matrix @ v

    def decrease(self, step: torch.Tensor) -> float:
        """See `Model`."""
        return -float(2 * step @ self.vector + step @ (self._matrix @ step))

    def dampings(self, lengths: torch.Tensor, image: bool = False) -> torch.Tensor:
        """Return the damping at which the step to the minimum has each of these lengths, measured by the scale; with
        `image`, √W J times it. From here on steps are found by singular values, and may be longer than rounding allows
        by a factorisation."""
        if self._spectrum is None:
            self._spectrum = Spectrum.of(self.vector / self._roots, self._scaled)
        return self._spectrum.dampings(lengths.to(self.vector.device), image)

    def refine(self, damping: float) -> bool:
        """Sum over the rows once more, for steps at this damping, if the first sum has too few digits for these; return
        whether it had."""
        again, spectrum = self._again, self._spectrum
        if again is None or spectrum is None or not spectrum.loses(damping):
            return False
        self._spectrum, self._again = spectrum.refined(lambda basis: again(basis / self._roots[:, None])), None
        return True


class SubspaceModel:
    """A dense `model` of f along the vectors of a `basis`, as one of f: its steps are within these."""

    def __init__(self, model: DenseModel, basis: Cosines, vector: torch.Tensor) -> None:
        self.vector, self._model, self._basis = vector, model, basis
        self.scale = torch.full_like(vector, float(model.scale[0]))

    def _lifted(self, found: torch.Tensor | None) -> torch.Tensor | None:
        return None if found is None else self._basis.lift(found.cpu()).to(self.vector)

    def _along(self, v: torch.Tensor) -> torch.Tensor:
        return self._basis.of(v[None].cpu())[0].to(self.vector)

    def minimum(self, damping: float) -> torch.Tensor | None:
        """See `Model`."""
        return self._lifted(self._model.minimum(damping))

    def solve(self, right: torch.Tensor, damping: float, free: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `Model`; there are no bounds, and all elements are free."""
        return self._lifted(self._model.solve(self._along(right), damping))

    def times(self, v: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        found = self._lifted(self._model.times(self._along(v)))
        assert found is not None
        return found

    def decrease(self, step: torch.Tensor) -> float:
        """See `Model`."""
        return self._model.decrease(self._along(step))

    def dampings(self, lengths: torch.Tensor) -> torch.Tensor:
        """See `DenseModel`."""
        return self._model.dampings(lengths)

    def refine(self, damping: float) -> bool:
        """See `DenseModel`."""
        return self._model.refine(damping)


class Rows(NamedTuple):
    """`loss` is f; JᵀWr is Jᵀ times `slopes`, and W has these `weights`, shapes `(N,)`; J is `rows`, shape `(N, n)`;
    all float64."""

    loss: float
    slopes: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor


class RowsModel:
    """The model with fewer rows than parameters. With R = √W J it is RᵀR + damping D, and steps are Rᵀ times solutions
    of N equations with RRᵀ. The scale is one number, the largest of the first diagonal of JᵀWJ. `exact`: singular
    values below the rounding of RRᵀ count, too. The rows are overwritten."""

    def __init__(self, found: Rows, before: torch.Tensor | None, exact: bool = True) -> None:
        # taken out of the roots, so that with twice the weights these have the same bits
        self._unit = power_of_two(float(found.weights.max())) if bool(found.weights.any()) else 1.0
        roots = (found.weights / self._unit).sqrt()
        self._rows = found.rows.mul_(roots[:, None])
        self._rows[roots == 0] = 0.0  # infinite elements would count, too
        self._residuals = torch.where(roots > 0, found.slopes / roots, 0.0) / self._unit
        self.vector = self._unit * (self._rows.T @ self._residuals)
        if before is None:
            largest = float(torch.linalg.vector_norm(self._rows, dim=0).square().max()) * self._unit
            before = torch.full_like(self.vector, largest or 1.0)
        self.scale, self._gram = before, _gram(self._rows)
        self._model = self._with(self._gram, self._again if exact else None)

    @property
    def is_finite(self) -> bool:
        """Tell whether J is, and the squares of its rows."""
        return bool(self._gram.diagonal().isfinite().all())

    def _with(self, gram: torch.Tensor, again: InBasis | None = None) -> DenseModel:
        scale = (self.scale[:1] / self._unit).repeat(len(gram))
        return DenseModel(self._residuals, gram, scale, False, again)

    def _again(self, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return basis.T @ self._residuals, _gram(basis.T @ self._rows)

    def minimum(self, damping: float) -> torch.Tensor | None:
        """See `Model`."""
        found = self._model.minimum(damping)
        return None if found is None else self._rows.T @ found

    def solve(self, right: torch.Tensor, damping: float, free: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `Model`; by the formula of Woodbury. With little damping and all elements free `right` is taken to be Jᵀ
        times something, of which that formula loses the digits."""
        model = self._model
        if free is None and damping < LITTLE:
            weights = model.solve(self._rows @ right / self._unit, LEAST)
            found = None if weights is None else model.solve(weights, damping)
            return None if found is None else self._rows.T @ found
        if free is not None and not bool(free.all()):
            model = self._with(self._gram - _gram(self._rows[:, free == 0]))
        found = model.solve(self._rows @ right, damping)
        if found is None:
            return None
        step = (right - self._rows.T @ found) / (damping * self.scale)
        return step if free is None else step * free

    def times(self, v: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._unit * (self._rows.T @ (self._rows @ v))

    def decrease(self, step: torch.Tensor) -> float:
        """See `Model`."""
        return -float(2 * step @ self.vector + self._unit * (self._rows @ step).square().sum())

    def dampings(self, lengths: torch.Tensor) -> torch.Tensor:
        """See `DenseModel`."""
        return self._model.dampings(lengths / math.sqrt(float(self.scale[0])), image=True)

    def refine(self, damping: float) -> bool:
        """See `DenseModel`."""
        return self._model.refine(damping)


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Return the products of the rows with each other."""
    matrix = rows.new_empty(len(rows), len(rows))
    for start, stop in stripes(len(rows)):
        block = rows[start:stop] @ rows[start:].T
        matrix[start:stop, start:], matrix[start:, start:stop] = block, block.T
    return matrix


# The models whose steps of a given length are known.
Solved = DenseModel | RowsModel | SubspaceModel


class ProductModel:
    """The model with products alone; the scale is one number, the curvature along the first gradient."""

    def __init__(self, products: Products, vector: torch.Tensor, before: torch.Tensor | None) -> None:
        self.vector, self._products = vector, products
        if before is None:
            unit = vector / _size(vector)
            length = float(unit @ unit)
            along = float(unit @ self.times(unit)) / length if length else 0.0
            before = torch.full_like(vector, along if 0 < along < math.inf else 1.0)
        self.scale = before
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # a solution, and the matrix times it

    def times(self, v: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._products.gauss_newton(v).double()

    def minimum(self, damping: float) -> torch.Tensor | None:
        """See `Model`."""
        return self.solve(-self.vector, damping)

    def solve(self, right: torch.Tensor, damping: float, free: torch.Tensor | None = None) -> torch.Tensor | None:
        """Solve by conjugate gradients (Hestenes and Stiefel, 1952), to their accuracy; see `Model`."""
        size = _size(right)
        found, residual = torch.zeros_like(right), right / size
        image, direction = torch.zeros_like(right), residual.clone()
        length = start = float(residual @ residual)
        for _ in range(MOST):
            if not length > ACCURACY**2 * start:
                break
            along = self.times(direction)
            damped = along + damping * self.scale * direction
            damped = damped if free is None else damped * free
            curvature = float(direction @ damped)
            if not 0 < curvature < math.inf:
                return None
            factor = length / curvature
            found += factor * direction
            image += factor * along
            residual -= factor * damped
            before, length = length, float(residual @ residual)
            direction = residual + (length / before) * direction
        found *= size
        self._last = found, image * size
        return found if bool(found.isfinite().all()) else None

    def decrease(self, step: torch.Tensor) -> float:
        """See `Model`."""
        image = self._last[1] if self._last is not None and step is self._last[0] else self.times(step)
        return -float(2 * step @ self.vector + step @ image)


def _size(vector: torch.Tensor) -> float:
    """Return a power of two that keeps the squares of the scaled elements in range."""
    return power_of_two(largest(vector)) if bool(vector.any()) else 1.0
