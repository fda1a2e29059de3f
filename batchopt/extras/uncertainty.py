"""The covariance of the parameters of a fit, by least squares, a likelihood, or the sandwich of both derivatives."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

import batchopt.extending as extending
from batchopt.errors import WorkerError
from batchopt.evaluations import Evaluations
from batchopt.extending import ScoreSums, Weighing, read_count, read_positive, reals
from batchopt.extras.covariance import Covariance, Curvature, Likelihood, flat

KINDS = ("least squares", "likelihood", "sandwich")
COLUMNS = 256  # of the Hessian, at a time
SINGLE = (
    "kind='sandwich' needs samples whose loss is made of their own numbers alone, without random ones (normalisation "
    "layers and dropout in evaluation mode), and without hooks"
)


class Part(NamedTuple):
    """A term of f: its criterion or loss function, its `denominators`, and how it weights samples."""

    criterion: Any
    loss_fn: Any
    denominators: Any
    weighing: Weighing

    @property
    def is_squares(self) -> bool:
        """Tell whether it is a sum of squares, or of robust functions of residuals."""
        known = type(self.criterion) is torch.nn.MSELoss if self.loss_fn is None else hasattr(self.loss_fn, "residual")
        return known and self.denominators is None

    @property
    def is_likelihood(self) -> bool:
        """Tell whether it may be that of its samples, each counted once: no prior, no robust loss, no weights."""
        is_robust = getattr(self.loss_fn, "loss", "linear") != "linear"
        weights = self.weighing.weights, *(getattr(self.criterion, name, None) for name in ("weight", "pos_weight"))
        return not is_robust and not self.weighing.is_penalty and all(one is None for one in weights)

    @property
    def is_mean_of_torch(self) -> bool:
        """Tell whether it is the mean of one of torch's criteria: over all numbers of a sample, too."""
        forward = getattr(type(self.criterion), "forward", None)
        own = getattr(forward, "__module__", "") == torch.nn.modules.loss.__name__
        return self.loss_fn is None and own and self.criterion.reduction in ("mean", "batchmean")


Parts = Mapping[str | None, Part]


class Fit(NamedTuple):
    """A `matrix` and a `gradient`, those of f times a number, the errors of the matrix (see `Curvature.of`), what is
    assumed, the number of residuals or else samples, f times the number: the sum of squares or of losses, and the sum
    of the logarithms of the weights, None where f is no likelihood."""

    matrix: torch.Tensor
    gradient: torch.Tensor
    rounding: tuple[float, float]
    assumes: str
    n: int
    total: float
    logarithms: float | None


def covariance_of(
    opt: Evaluations, kind: str | None, sigma: float | None, tolerance: float | None, limit: int
) -> Covariance:
    """Return the covariance of the parameters; documented at `BatchOptimizer.covariance`."""
    parts, (parameters, places) = _parts(opt), _fitted(opt)
    kind = kind or ("least squares" if all(part.is_squares for part in parts.values()) else "likelihood")
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {list(KINDS)}, or None, got {kind!r}")
    if sigma is not None and kind != "least squares":
        raise ValueError(f"`sigma`, the standard deviation of residuals, is for kind='least squares'; got {kind!r}")
    sigma = None if sigma is None else read_positive("sigma", sigma)
    tolerance = None if tolerance is None else read_positive("tolerance", tolerance)
    limit, names = read_count("limit", limit), _names(parameters)
    fit = (_squares if kind == "least squares" else _likelihood)(opt, parts, places, limit)
    curvature = Curvature.of(fit.matrix, tolerance, *fit.rounding)
    _check_minimum(opt, curvature, sum(fit.rounding) if tolerance is None else tolerance, names)
    inverse, assumes, freedom, variance = curvature.inverse, fit.assumes, math.inf, None
    if kind == "sandwich":
        inverse = inverse @ _meat(opt, parts, [*parameters], fit.gradient) @ inverse
        assumes = "samples are independent and many; their distribution may differ from the model (Huber, White: HC0)"
    elif sigma is not None:
        inverse, assumes = sigma**2 * inverse, f"{assumes}, which is known: the standard deviation is {sigma:g}"
    elif kind == "least squares":
        freedom = _freedom(fit.n, len(places), curvature.singular)
        variance = fit.total / freedom
        inverse, assumes = variance * inverse, f"{assumes}, which is estimated from them"
    steps = (curvature.inverse @ fit.gradient).abs()
    distance = float(torch.where(steps == 0, 0.0, steps / inverse.diagonal().clamp(min=0).sqrt()).max())
    values, likelihood = flat([*parameters.values()]), _maximum(fit, kind, sigma, len(places) - curvature.singular)
    return Covariance(
        kind,
        assumes,
        names,
        values,
        freedom,
        variance,
        distance,
        curvature,
        inverse,
        opt.module,
        parameters,
        likelihood,
    )


def _maximum(fit: Fit, kind: str, sigma: float | None, k: int) -> Likelihood | None:
    """Return the likelihood of k parameters, and of the variance where it is not known; None where f has none."""
    if fit.logarithms is None or kind == "sandwich":
        return None
    if kind == "likelihood":
        return Likelihood(fit.n, -fit.total, k)
    known = sigma is not None
    variance = sigma**2 if sigma is not None else fit.total / fit.n  # the most likely one: no degrees of freedom
    if variance == 0:
        return Likelihood(fit.n, math.inf, k + 1)
    squares = fit.n * math.log(2 * math.pi * variance) + fit.total / variance
    return Likelihood(fit.n, (fit.logarithms - squares) / 2, k + (not known))


def _check_minimum(opt: Evaluations, curvature: Curvature, tolerance: float, names: Sequence[str]) -> None:
    """Raise `ValueError` for an eigenvalue that is negative by more than the tolerance."""
    lowest = float(curvature.eigenvalues[0])
    if lowest < -tolerance:
        raise ValueError(
            f"X is no minimum of f: its Hessian, scaled to a unit diagonal, has the eigenvalue {lowest:.3g} along "
            f"{curvature.direction(curvature.eigenvectors[:, 0], lowest, names)}; the largest element of df/dX is "
            f"{float(opt.grad_parameters.abs().max()):.3g}: optimize further, or pass a larger `tolerance` if this is "
            "rounding"
        )


def _freedom(residuals: int, parameters: int, singular: int) -> float:
    """Return the degrees of freedom. Raises `ValueError` if there are none."""
    freedom = residuals - parameters + singular
    if freedom < 1:
        raise ValueError(
            f"{residuals} residuals leave {parameters} parameters no degrees of freedom, so their variance cannot be "
            "estimated: pass `sigma`, the standard deviation of a residual, or load more samples"
        )
    return float(freedom)


def _parts(opt: Evaluations) -> Parts:
    """Return the terms whose weight is not 0, by name; without terms, f under None."""
    arguments = extending.arguments(opt)
    terms = arguments["terms"]
    if terms is None:
        (weighing,) = extending.weighings(opt).values()
        return {None: Part(opt.criterion, arguments["loss_fn"], arguments["denominators"], weighing)}
    return {
        name: Part(None, terms[name].loss_fn, terms[name].denominators, weighing)
        for name, weighing in extending.weighings(opt).items()
        if name is not None and weighing.weight
    }


def _fitted(opt: Evaluations) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return copies of the parameters that are trained and not frozen, in the order of X, and their places in it."""
    x, found = opt.parameters, []
    for name, parameter in opt.module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            start = (parameter.data_ptr() - x.data_ptr()) // x.element_size()
            found.append((range(start, start + reals(parameter.detach()).numel()), name, parameter.detach().clone()))
    if not found:
        raise ValueError("all parameters are frozen: there is nothing that could have an error")
    found.sort(key=lambda one: one[0].start)
    return {name: value for _, name, value in found}, torch.tensor([place for places, *_ in found for place in places])


def _names(parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the name of each number: `0.weight[2, 1]`, for a complex one with `.real` and `.imag`."""
    return tuple(
        f"{name}{list(index) if index else ''}{kind}"
        for name, value in parameters.items()
        for index in product(*map(range, value.shape))
        for kind in ((".real", ".imag") if value.is_complex() else ("",))
    )


def _divisor(parts: Parts) -> float:
    """Return what the mean over samples is divided by, 1 for sums. Raises `ValueError` for means of several terms."""
    if all(part.weighing.reduction == "sum" or part.weighing.is_penalty for part in parts.values()):
        return 1.0
    if len(parts) > 1:
        raise ValueError(
            f"f is a sum of means over the samples of {[*parts]}, each with its own divisor, and neither the sum of "
            "squares nor the likelihood of all: use Term(..., reduction='sum', weight=...), where the weight of "
            "residuals is 1 / variance"
        )
    (part,) = parts.values()
    return part.weighing.divisor


def _squares(opt: Evaluations, parts: Parts, places: torch.Tensor, limit: int) -> Fit:
    """Return JᵀVJ, where V has the weights of samples and terms, and f is rᵀVr divided by the divisor of the mean."""
    if any(getattr(part.loss_fn, "loss", "linear") != "linear" for part in parts.values()):
        raise ValueError(
            "a robust loss is no sum of squares, and the variance of residuals says nothing about its minimum: use "
            "kind='sandwich'"
        )
    numbers, divisor, logarithms = _residuals(opt, parts)
    normal, eps = opt.normal(limit=limit), torch.finfo(opt.parameters.dtype).eps
    # rows are computed in X's dtype, and their products summed in float64
    rounding = 10 * len(places) * torch.finfo(torch.float64).eps, 10 * len(places) ** 0.5 * eps
    ways = [part.weighing for part in parts.values()]
    weighted = any(way.weights is not None or way.weight != 1.0 or way.is_penalty for way in ways)
    variances = "variances that are one number / weight" if weighted else "one variance"
    assumes = (
        f"the model is linear within some standard errors; the errors of {numbers} residuals are independent, with "
        f"mean 0 and {variances}"
    )
    matrix, gradient = divisor * normal.matrix[places][:, places], divisor * normal.vector[places]
    has_likelihood = not any(way.is_penalty for way in ways)
    return Fit(
        matrix, gradient, rounding, assumes, numbers, divisor * normal.loss, logarithms if has_likelihood else None
    )


def _residuals(opt: Evaluations, parts: Parts) -> tuple[int, float, float]:
    """Return the number of residuals whose weight is not 0, the divisor of their squares in f, and the sum of the
    logarithms of their weights."""
    found, numbers, divisor, logarithms = opt.residuals(), 0, _divisor(parts), 0.0
    for name, part in parts.items():
        weights = part.weighing.weights
        sizes = torch.tensor([one.numel() for one in (found if name is None else found[name])])
        if part.weighing.reduction == "mean" and not part.weighing.is_penalty:
            if bool((sizes != sizes[0]).any()):
                raise ValueError(
                    "samples have different numbers of residuals, which count less where there are more, as f is the "
                    "mean of the samples' means: use the reduction 'sum'"
                )
            divisor *= int(sizes[0])
        weights = torch.ones(len(sizes), dtype=torch.float64) if weights is None else weights
        counted = sizes[weights > 0]
        numbers += int(counted.sum())
        logarithms += float((counted * (part.weighing.weight * weights[weights > 0]).log()).sum())
    return numbers, divisor, logarithms


def _likelihood(opt: Evaluations, parts: Parts, places: torch.Tensor, limit: int) -> Fit:
    """Return the Hessian and the gradient of the sum over the samples."""
    x = opt.parameters
    if len(x) > limit:
        raise ValueError(f"the Hessian of {len(x):,} parameters takes as many products: give `limit`, now {limit:,}")
    count = _count(opt, parts)
    f = float(opt.evaluate())
    units = torch.split(torch.eye(len(x), dtype=x.dtype)[:, places], COLUMNS, dim=1)
    hessian = torch.cat([opt.hvp(columns).to("cpu", torch.float64)[places] for columns in units], 1)
    of_all = "f" if count == 1 else f"f times {count:g}"
    whose = "independent samples, which the model describes; they are many"
    if count == 1 == sum(part.weighing.samples for part in parts.values()):
        whose = "one sample, which the model describes; it has many independent parts"
    assumes = f"{of_all} is the negative log likelihood of {whose}"
    if any(part.is_squares for part in parts.values()):
        assumes += "; squares are those of residuals with the variance 1/2"
    rounding = 10 * len(places) * torch.finfo(x.dtype).eps, 0.0
    gradient = opt.grad_parameters.to("cpu", torch.float64)[places]
    samples = sum(part.weighing.samples for part in parts.values())
    logarithms = 0.0 if all(part.is_likelihood for part in parts.values()) else None
    return Fit(count / 2 * (hessian + hessian.T), count * gradient, rounding, assumes, samples, count * f, logarithms)


def _count(opt: Evaluations, parts: Parts) -> float:
    """Return the number by which f is multiplied to be the sum over samples."""
    divisor, part = _divisor(parts), next(iter(parts.values()))
    if not part.is_mean_of_torch or part.criterion.reduction == "batchmean" or part.denominators is not None:
        return divisor
    if isinstance(part.criterion, torch.nn.CTCLoss):
        raise ValueError("the mean of CTCLoss divides by the lengths of targets, too: use reduction='sum'")
    each = copy.copy(part.criterion)
    each.reduction = "none"

    def counted(module: torch.nn.Module, inputs: Any, targets: Any) -> tuple[int, int, int]:
        ignored = getattr(each, "ignore_index", None)
        are_classes = ignored is not None and isinstance(targets, torch.Tensor) and not targets.is_floating_point()
        numbers = each(module(inputs), targets).numel()
        return numbers, numbers * are_classes, int((targets == ignored).sum()) if are_classes else 0

    numbers, classes, ignored = (int(found) for found in opt.total(counted))
    if numbers == part.weighing.samples:
        return divisor
    if not classes or (each.weight is None and not ignored):
        return divisor * numbers / part.weighing.samples
    if part.weighing.one_by_one:
        raise ValueError("f is the mean of the means over the classes of each sample: use reduction='sum'")
    return divisor  # the weights of all classes, of which samples have several


def _meat(opt: Evaluations, parts: Parts, names: list[str], gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of the outer products of the samples' scores. Raises `ValueError` unless these sum up to
    `gradient`."""
    if any(opt.module.get_parameter(name).is_complex() for name in names):
        raise ValueError("kind='sandwich' needs real parameters: use kind='likelihood'")
    if any(part.weighing.one_by_one or part.weighing.weights is not None for part in parts.values()):
        raise ValueError("kind='sandwich' needs samples that are rows of tensors, without weights: use 'likelihood'")
    if any(part.weighing.is_penalty for part in parts.values()):
        raise ValueError("kind='sandwich' is of samples, and a Penalty has none: use 'likelihood', where it is a prior")
    functions: Any = {}
    for name, (criterion, loss_fn, denominators, weighing) in parts.items():
        if parts[name].is_mean_of_torch:
            criterion = copy.copy(criterion)
            criterion.reduction = "sum"
        functions[name] = ScoreSums(criterion, loss_fn, names, weighing.weight, denominators)
    try:
        found = opt.total(functions.get(None, functions))
    except WorkerError as error:
        raise ValueError(f"torch.func cannot differentiate the loss of single samples; {SINGLE}: {error}") from error
    each = [found] if None in functions else [*found.values()]
    scores, products = (torch.stack([one[key] for one in each]).sum(0) for key in ("scores", "products"))
    allowed = torch.finfo(opt.parameters.dtype).eps ** 0.5 * (extending.batch_size(opt) * products.diagonal()).sqrt()
    if bool(((scores - gradient).abs() > allowed).any()):
        raise ValueError(f"the gradients of single samples do not sum up to df/dX; {SINGLE}")
    return products
