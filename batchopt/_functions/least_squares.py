"""Residuals, their Jacobian and the normal equations, where f is a sum of squares."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from batchopt._data import arguments
from batchopt._data.batches import BatchSpecs
from batchopt._data.terms import check_names
from batchopt._engine.engine import Engine
from batchopt._functions.columns import jacobian_by_columns
from batchopt._functions.tasks import Selection, collect, of_each, plain, select, total
from batchopt.optim.quadratic import Rows
from batchopt_workers.batch.batch import Part
from batchopt_workers.batch.weighting import SAMPLE_WEIGHT
from batchopt_workers.functions.least_squares import (
    Accelerations,
    GaussNewtonProducts,
    JacobianProduct,
    JacobianRows,
    NormalSums,
    Residuals,
    TransposedProduct,
    stripes,
)
from batchopt_workers.functions.squares import MeanSquare, of_residuals, squares_of
from batchopt_workers.functions.subspace import Basis
from batchopt_workers.functions.task import PieceFunction, Task

# Default limit of the number of parameters for which a matrix is made.
LARGEST = 5_000


class Normal(NamedTuple):
    """The normal equations of f = rᵀWr, in float64: `loss` is f; `vector` JᵀWr, half of df/dX, shape `(n,)`; `matrix`
    JᵀWJ, symmetric, shape `(n, n)`.

    W has the weights of the squares in f: that of the term divided by the number of its residuals, times those of
    samples. Under a robust loss, `loss` and `vector` are f's, and W in `matrix` is smaller for large residuals, by the
    correction of Triggs and others ("Bundle adjustment: a modern synthesis", 2000).
    """

    loss: float
    vector: torch.Tensor
    matrix: torch.Tensor

    def __repr__(self) -> str:
        return f"Normal(loss={self.loss:.6g}, vector and matrix of {len(self.vector)} parameters)"


class Roots(NamedTuple):
    """The result of `square_roots` for a term: shape `(N,)` both."""

    values: torch.Tensor
    slopes: torch.Tensor


def residuals(engine: Engine, inputs: Any, targets: Any) -> Any:
    """Return the residuals of the loaded batch or of other data, shape `(samples, d)`; by term where there are terms.
    For other data these are the terms that `inputs` has."""
    names = [*engine.specs]
    if engine.reader.terms is not None and isinstance(inputs, Mapping) and inputs:
        check_names("the batch", {**engine.reader.terms, **inputs}, engine.reader.terms)  # reject unknown names
        names = [name for name in names if name in inputs]
    return _rows(engine, Residuals(), select(engine, inputs, targets, _specs(engine, names)))


def jacobian_product(engine: Engine, v: Any) -> Any:
    """Return J times `v`."""
    task = JacobianProduct(_vector(engine, v))
    return _rows(engine, task, _loaded(engine))


def transposed_product(engine: Engine, u: Any) -> torch.Tensor:
    """Return Jᵀ times `u`, shape `(n,)`, X's dtype."""
    selections = _loaded(engine)
    given = u if isinstance(u, Mapping) else {None: u}
    names = [s.name for s in selections]
    if set(given) != set(names):
        raise ValueError(
            f"`u` must be as residuals() returns them: {'a tensor' if names == [None] else f'a dict with {names}'}"
        )
    x = engine.subject.x
    whole = torch.zeros(len(x), dtype=torch.float64)
    for s in selections:
        weights = given[s.name]
        each = weights if type(weights) is list else [weights]
        each = [arguments.read_floating("u", one).detach().to(x.dtype).contiguous() for one in each]
        rows = each if type(weights) is list else each[0]
        if len(rows) != s.batch.size:
            raise ValueError(
                f"`u` must have a row for each of {s.batch.size} samples, as residuals() has; got {len(rows)}"
            )
        task = s.task(TransposedProduct(rows))
        whole += total(engine, task, s.batch, "product with the transposed Jacobian")
    return whole.to(x.dtype)


def gauss_newton_product(engine: Engine, v: Any) -> torch.Tensor:
    """Return JᵀWJ times a vector, shape `(n,)`, or times each column of a matrix, shape `(n, k)`; X's dtype."""
    _check(engine)
    size = len(engine.parameters)
    columns = arguments.read_columns(arguments.read_floating("v", v), size)
    directions = columns.detach().to(engine.subject.x.dtype).reshape(size, -1).T.contiguous()
    task = Task(GaussNewtonProducts(directions), term=None)
    found = total(engine, task, engine.current_step().batch, "Gauss-Newton product")
    product: torch.Tensor = found.T.to(engine.subject.x.dtype).reshape(columns.shape)
    return product


def accelerations(engine: Engine, directions: torch.Tensor) -> torch.Tensor:
    """Return JᵀW times the second derivative of the residuals along each row, shape `(k, n)`; X's dtype."""
    task = Task(Accelerations(torch.stack([_vector(engine, row) for row in directions])), term=None)
    found: torch.Tensor = total(engine, task, engine.current_step().batch, "second derivative of the residuals")
    return found.to(engine.subject.x.dtype)


def normal(engine: Engine, limit: int, basis: Basis | None = None) -> Normal:
    """Return the normal equations of the loaded batch; of J times the vectors of the `basis`, if given. Raises
    `ValueError` for more than `limit` parameters."""
    _check(engine)
    size = len(engine.parameters) if basis is None else basis.columns
    if size > arguments.read_count("limit", limit):
        raise ValueError(
            f"the matrix of {size:,} parameters would have {8 * size**2 / 1e9:,.1f} GB, and some in each worker: use "
            f"gauss_newton(v), its product with a vector, or give `limit`, which is {limit:,}"
        )
    step, known = engine.current_step(), jacobian_by_columns(engine)
    task = Task(NormalSums(stripes(size), known, basis), term=None)
    found = total(engine, task, step.batch, "matrix of the normal equations")
    if found["each"]:
        warnings.warn(
            f"{int(found['each']):,} rows of the Jacobian took a backward each, which is slow: residual and module can "
            "neither be evaluated sample by sample (torch.func.vmap), nor can torch take several of their backwards at "
            "once (is_grads_batched), as with an autograd.Function of one's own. Make residuals of their own sample "
            "alone, by torch's functions on whole tensors",
            stacklevel=3,
        )
    matrix = torch.empty(size, size, dtype=torch.float64)
    for (start, stop), stripe in zip(stripes(size), found["matrix"], strict=True):
        matrix[start:stop, start:stop] = _mirrored(stripe[:, : stop - start])
        matrix[start:stop, stop:] = stripe[:, stop - start :]
        matrix[stop:, start:stop] = stripe[:, stop - start :].T
    return Normal(float(found["loss"]), found["vector"].clone(), matrix)


def gram(engine: Engine, limit: int) -> torch.Tensor:
    """Return JJᵀ of the loaded batch, float64; rows in the order of residuals, one term after the other."""
    found = _rows(engine, Residuals(), _loaded(engine))
    count = sum(len(flat(one)) for one in (found.values() if isinstance(found, Mapping) else [found]))
    if count > arguments.read_count("limit", limit):
        raise ValueError(
            f"the matrix of {count:,} residuals would have {8 * count**2 / 1e9:,.1f} GB: load fewer samples, use jvp() "
            f"and vjp(), or give `limit`, which is {limit:,}"
        )
    rows = jacobian(engine)
    parts = rows.values() if isinstance(rows, Mapping) else [rows]
    whole = torch.cat([flat(part) for part in parts]).double()
    return _mirrored(whole @ whole.T)


def _mirrored(matrix: torch.Tensor) -> torch.Tensor:
    """Return the symmetric matrix with this upper triangle: on some processors the triangles of a product of a matrix
    and its transpose differ in their last bits."""
    return matrix.triu() + matrix.triu(1).T


def jacobian(engine: Engine) -> Any:
    """Return the rows of the Jacobian: shape `(samples, d, n)`; by term where there are terms."""
    return _rows(engine, JacobianRows(), _loaded(engine))


def weighted_rows(engine: Engine, most: int) -> Rows | None:
    """Return J with the weights of its rows, in the order of `gram`, of the terms whose weight is not 0; None if there
    are more than `most` rows, or none."""
    _check(engine)
    step, settings, parts = engine.current_step(), engine.settings, []
    selections = [s for s, weight in zip(_loaded(engine), step.weights, strict=True) if weight]
    if not 0 < sum(s.batch.size for s in selections) <= most:
        return None
    residuals = [_joined(collect(engine, s.task(Residuals()), s.batch)) for s in selections]
    if sum(len(flat(one)) for one in residuals) > most:
        return None
    for s, own in zip(selections, residuals, strict=True):
        squares = squares_of(settings.criterion, settings.loss_fns[s.number])
        assert squares is not None  # ensured by `_check`
        values = flat(own).double().reshape(-1)
        factors = step.weights[s.number] * _factors(squares, step.batch.parts[s.number], own, values)
        factors = factors.expand_as(values)
        rows = flat(_joined(collect(engine, s.task(JacobianRows()), s.batch)))
        loss = (squares.of(values) * factors).sum()
        parts.append((loss, squares.slope(values) * factors * values, squares.curvature(values) * factors, rows))
    losses, slopes, weights, whole = zip(*parts, strict=True)
    return Rows(float(sum(losses)), torch.cat(slopes), torch.cat(weights), torch.cat(whole).double())


def square_roots(engine: Engine, found: Mapping[str | None, Any]) -> dict[str | None, Roots]:
    """Return for each term's residuals, as returned by `residuals`, numbers of which f is half the sum of squares, and
    their derivatives with respect to the residuals."""
    settings, step, roots = engine.settings, engine.current_step(), {}
    for (name, residuals), part, loss_fn, weight in zip(
        found.items(), step.batch.parts, settings.loss_fns, step.weights, strict=True
    ):
        squares = squares_of(settings.criterion, loss_fn)
        assert squares is not None  # ensured by `_check`
        values = flat(residuals).double().reshape(-1)
        factors = (2 * weight * _factors(squares, part, residuals, values)).sqrt()
        own, slopes = squares.roots(values)
        roots[name] = Roots(own * factors, slopes * factors)
    return roots


def _factors(squares: MeanSquare, part: Part, residuals: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the weight of each residual in the term's loss."""
    sample_weight = part.criterion_rows.get(SAMPLE_WEIGHT)
    if not part.one_by_one:
        whole = squares.weight(1.0, len(values), sample_weight)
        return torch.as_tensor(of_residuals(sample_weight, values) * whole, dtype=torch.float64)
    found = []
    for i, one in enumerate(residuals):  # each is a piece with its own number of residuals
        own = None if sample_weight is None else sample_weight[i]
        weight = squares.weight(part.weighting.of(i, i + 1), one.numel(), own)
        found.append(torch.full((one.numel(),), weight if own is None else weight * float(own), dtype=torch.float64))
    return torch.cat(found)


def _rows(engine: Engine, task: PieceFunction, selections: list[Selection]) -> Any:
    return of_each(selections, lambda s: _joined(collect(engine, s.task(task), s.batch)))


def _joined(found: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate results of samples one by one, if they have the same shape."""
    if isinstance(found, list) and len({one.shape for one in found}) == 1:
        return torch.cat(found)
    return found


def flat(part: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Return one row per residual, one sample after the other, from `(samples, d, ...)` or a list of such."""
    return part.flatten(0, 1) if isinstance(part, torch.Tensor) else torch.cat([one.flatten(0, 1) for one in part])


def _loaded(engine: Engine) -> list[Selection]:
    return select(engine, None, None, _specs(engine))


def _specs(engine: Engine, names: Sequence[str | None] | None = None) -> BatchSpecs:
    """Return the specs of the terms with these names; None: of all."""
    _check(engine, names)
    specs = plain(engine.specs)
    return specs if names is None else {name: specs[name] for name in names}


def _check(engine: Engine, among: Sequence[str | None] | None = None) -> None:
    """Raise `BatchoptError` after `close`, `ValueError` if one of these terms (None: of all) is no sum of squares."""
    engine.resync()
    settings = engine.settings
    names = [None] if settings.terms is None else [*settings.terms]
    for name, loss_fn in zip(names, settings.loss_fns, strict=True):
        if among is not None and name not in among:
            continue
        if squares_of(settings.criterion, loss_fn) is None or settings.denominators is not None:
            which = "f" if name is None else f"the term {name!r}"
            raise ValueError(
                f"{which} is not known to be a sum of squares: use criterion=torch.nn.MSELoss() without "
                "`denominators`, or batchopt.Term(residual=...), whose loss is the mean square of what it returns"
            )


def _vector(engine: Engine, v: Any) -> torch.Tensor:
    """Return `v` as a vector like X. Raises `TypeError` or `ValueError`."""
    _check(engine)
    x = engine.parameters
    vector = arguments.read_floating("v", v)
    if vector.shape != x.shape:
        raise ValueError(f"`v` must have shape ({len(x)},), as `parameters`; got {tuple(vector.shape)}")
    return vector.detach().to(x.dtype).contiguous()
