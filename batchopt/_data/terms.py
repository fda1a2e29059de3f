"""Objectives of several terms, each with its own loss, data and weight in f."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from numbers import Real
from typing import Any

import torch

from batchopt._data import arguments
from batchopt._data.denominators import is_torchs_own, resolve_reduction
from batchopt_workers.batch.items import Collate
from batchopt_workers.batch.weighting import Denominators
from batchopt_workers.evaluate.objective import LossFunction, ModuleFunction, OfModule
from batchopt_workers.functions.squares import LOSSES, MeanSquare, ResidualFunction


@dataclass(frozen=True)
class Weighted:
    """The inputs of a batch, or of a term, whose samples have weights: `opt.step(Weighted(inputs, weights), targets)`.

    Args:
        inputs: of any form that `BatchOptimizer.load` takes.
        sample_weight: shape `(samples,)`: finite numbers >= 0, not all 0. A mean is then the sum of the samples'
            weighted losses divided by the sum of the weights; with class weights, by the sum of the products of both; a
            sum is the sum of weighted losses. A sample of weight 0 is still evaluated, and must have a finite loss.

    For the losses of `torch.nn` except `CTCLoss`, and for residuals, including robust losses. `load` raises
    `ValueError` for any other loss, since the losses of its samples are unknown: put the weights into the targets
    there, and pass `denominators`.

    >>> x, model = torch.tensor([[0.0], [1.0]]), torch.nn.Linear(1, 1, bias=False)
    >>> with batchopt.BatchOptimizer(model, torch.nn.MSELoss()) as opt:
    ...     loss = opt.step(batchopt.Weighted(torch.ones(2, 1), [3.0, 1.0]), x)
    >>> round(model.weight.item(), 4)  # (3 * 0 + 1 * 1) / (3 + 1)
    0.25
    """

    inputs: Any
    sample_weight: Any

    def __repr__(self) -> str:
        return f"Weighted({arguments.short(self.inputs)}; weights of {len(self.sample_weight)} samples)"


def read_weights(sample_weight: Any, samples: int) -> torch.Tensor:
    """Return the weights as float64, shape `(samples,)`. Raise `TypeError` or `ValueError`."""
    needed = f"`sample_weight` must be {samples} finite numbers >= 0, one a sample"
    try:
        has_dtype = hasattr(sample_weight, "dtype")  # a list of numbers would be rounded to torch's default
        weights = torch.as_tensor(sample_weight, dtype=None if has_dtype else torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{needed}; got {type(sample_weight).__name__}: {error}") from error
    if weights.is_complex():
        raise TypeError(f"{needed}; got complex ones")
    if weights.shape != (samples,):
        raise ValueError(f"{needed}; got shape {tuple(weights.shape)}")
    weights = weights.to("cpu", torch.float64, copy=True)
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.any()):
        raise ValueError(f"{needed}, not all 0; got {weights[~(weights > 0)][:3].tolist()} among them")
    return weights


def refuse_weights(criterion: Any, is_of_residuals: bool, denominators: Denominators | None, is_read: bool) -> None:
    """Raise `ValueError` for a loss whose samples cannot have weights; `is_read`: workers read the targets."""
    of_torch = is_torchs_own(criterion) and not isinstance(criterion, torch.nn.CTCLoss)
    if not (is_of_residuals or of_torch) or denominators is not None:
        raise ValueError(
            "samples can have weights where their losses are known: with a criterion of torch.nn (not CTCLoss) or "
            "residuals, without `denominators`. Of any other loss put the weights into the targets, return "
            "(weights * losses).sum() / weights.sum(), and pass denominators=lambda inputs, targets: the weights"
        )
    if is_read and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            "samples of a Dataset cannot have weights where the criterion has weights, too: what the mean divides by "
            "is not known before all targets were read; pass tensors"
        )


class AnyTerm:
    """A term of an objective, with or without samples."""

    weight: float


@dataclass(frozen=True)
class Term(AnyTerm):
    """One term of an objective: f is the sum over the terms of `weight` times the mean (or sum) over the term's
    samples.

    Args:
        loss_fn: `loss_fn(module, inputs, targets) -> scalar`; `targets` is None if the term's data has none.
        residual: instead of it, `residual(module, inputs, targets)`, shape `(samples, ...)`: the loss is the mean of
            the squares of all these numbers (or, with the reduction `"sum"`, their sum), and least squares know its
            Jacobian. Each row must depend only on its own sample.
        loss, scale: for residuals r, instead of their squares: the mean of scale² rho((r / scale)²), where rho is that
            of `"linear"`, the default (the squares), `"soft_l1"`, `"huber"`, `"cauchy"` or `"arctan"`, as in SciPy's
            `least_squares`: outliers, residuals much larger than `scale` (default 1), have less influence.
        weight: finite and >= 0. With 0 the term's loss is evaluated, and adds nothing to f and df/dX.
        reduction: `"mean"`, the default, or `"sum"`: the meaning of the term's loss of several samples.
        denominators, collate_fn: of this term, as in `BatchOptimizer`.

    Raises `TypeError` or `ValueError` for anything else.

    >>> terms = {
    ...     "known": batchopt.Term(lambda net, x, y: (net(x) - y).square().mean(), weight=10.0),
    ...     "smooth": batchopt.Term(residual=lambda net, x, _: net(x + 0.1) - net(x)),
    ... }
    >>> with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), terms=terms) as opt:
    ...     loss = opt.step({"known": (torch.ones(5, 1), torch.zeros(5, 1)), "smooth": torch.rand(20, 1)})
    >>> sorted(opt.losses), opt.weights["known"]
    (['known', 'smooth'], 10.0)
    """

    loss_fn: LossFunction | None = None
    weight: float = 1.0
    reduction: str = "mean"
    denominators: Denominators | None = None
    collate_fn: Collate | None = None
    residual: InitVar[ResidualFunction | None] = field(default=None, kw_only=True)
    loss: str = field(default="linear", kw_only=True)
    scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self, residual: ResidualFunction | None) -> None:
        if (self.loss_fn is None) == (residual is None):
            raise TypeError(
                "`loss_fn` of a Term must be a function of (module, inputs, targets), or `residual` one in its place; "
                f"got {'None' if residual is None else 'both'}"
            )
        if residual is not None:
            arguments.check_callable("residual", residual)
            object.__setattr__(self, "loss_fn", MeanSquare(residual, "mean", *_read_robust(self.loss, self.scale)))
        elif (self.loss, self.scale) != ("linear", 1.0) and not isinstance(self.loss_fn, MeanSquare):
            raise ValueError("`loss` and `scale` of a Term are those of its `residual`: a `loss_fn` has its own")
        arguments.check_loss_fn(self.loss_fn)
        object.__setattr__(self, "weight", _read_weight("`weight` of a Term", self.weight))
        object.__setattr__(self, "reduction", resolve_reduction(self.reduction, None))
        if isinstance(self.loss_fn, MeanSquare):
            if self.denominators is not None:
                raise ValueError(
                    "`denominators` of a Term with a `residual`: its mean is over the residuals; give samples weights "
                    "by batchopt.Weighted(inputs, sample_weight)"
                )
            object.__setattr__(self, "loss_fn", replace(self.loss_fn, reduction=self.reduction))
        arguments.check_callable("denominators", self.denominators)
        arguments.check_callable("collate_fn", self.collate_fn)

    def __repr__(self) -> str:
        of = self.loss_fn
        name, function = ("residual", of.residual) if isinstance(of, MeanSquare) else ("loss_fn", of)
        given = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        changed = [f"{k}={arguments.short(given[k])}" for k in given if given[k] != getattr(Term, k)]
        return f"Term({', '.join([f'{name}={arguments.short(function)}', *changed])})"


@dataclass(frozen=True)
class Penalty(AnyTerm):
    """A term of an objective that has no samples, beside the `Term`s: it adds `weight` times a function of the module,
    such as a ridge, a total variation or a soft constraint on coefficients, to f.

    Args:
        function: `function(module) -> scalar`.
        residual: instead of it, `residual(module)`, a tensor of any shape: the penalty is the mean of the squares of
            its numbers, as for `Term`, and least squares know its Jacobian. `weight=n` of n numbers is their sum.
        weight: finite and >= 0.

    It is evaluated once in each evaluation, by one worker, and has no entry in the batch. `opt.losses` and
    `opt.weights` have it under its name; `sample_counter` counts it as one sample. Raises `TypeError` or `ValueError`
    for anything else.

    >>> known = batchopt.Term(residual=lambda net, x, y: net(x) - y)
    >>> ridge = batchopt.Penalty(residual=lambda net: net.weight, weight=0.1)
    >>> net = torch.nn.Linear(3, 1, bias=False)
    >>> with batchopt.BatchOptimizer(net, terms={"known": known, "ridge": ridge}, optimizer="lm") as opt:
    ...     loss = opt.step({"known": (torch.rand(50, 3), torch.ones(50, 1))})
    >>> torch.allclose(torch.tensor(opt.losses["ridge"]).float(), net.weight.square().mean())
    True
    """

    function: ModuleFunction | None = None
    weight: float = 1.0
    residual: ModuleFunction | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if (self.function is None) == (self.residual is None):
            raise TypeError(
                "`function` of a Penalty must be a function of the module, or `residual` one in its place; "
                f"got {'None' if self.residual is None else 'both'}"
            )
        for name in ("function", "residual"):
            arguments.check_callable(name, getattr(self, name), ("module",))
        object.__setattr__(self, "weight", _read_weight("`weight` of a Penalty", self.weight))

    def __repr__(self) -> str:
        name = "function" if self.residual is None else "residual"
        return f"Penalty({name}={arguments.short(getattr(self, name))}, weight={self.weight})"

    def _term(self) -> Term:
        """Return the term of one sample that is the penalty: a sum, as it divides by no number of samples."""
        if self.function is not None:
            return Term(OfModule(self.function), self.weight, "sum")
        assert self.residual is not None
        return Term(residual=OfModule(self.residual, is_residual=True), weight=self.weight)


def read_terms(terms: Any, **instead: Any) -> dict[str, Term] | None:
    """Return the given terms, by name; None if there are none. `instead`: the arguments that a `Term` replaces.

    Raise `TypeError` or `ValueError` unless there is at least one, each is a `Term` or a `Penalty` under a string, and
    all of `instead` are None.
    """
    if terms is None:
        return None
    if not isinstance(terms, Mapping):
        raise TypeError(f"`terms` must be a dict of names and batchopt.Term, got {type(terms).__name__}")
    if not terms:
        raise ValueError("`terms` is empty: give one Term at least, or `criterion` or `loss_fn` in its place")
    for name, term in terms.items():
        if not isinstance(name, str):
            raise TypeError(f"the names in `terms` must be strings, got {type(name).__name__} {name!r}")
        if not isinstance(term, AnyTerm):
            hint = f": did you mean Term({getattr(term, '__name__', 'loss_fn')})?" if callable(term) else ""
            raise TypeError(f"`terms[{name!r}]` must be a batchopt.Term or Penalty, got {type(term).__name__}{hint}")
    for argument, value in instead.items():
        if value is not None:
            raise ValueError(
                f"`terms` and `{argument}` are both given: each Term has its own loss_fn and what belongs to it"
            )
    return {name: term if isinstance(term, Term) else term._term() for name, term in terms.items()}


def reweighed(terms: Mapping[str, Term] | None, weights: Any) -> dict[str, Term]:
    """Return the terms with other weights, one for each name.

    Raise `TypeError` or `ValueError` for other names, for anything but finite numbers >= 0, and if there are no terms.
    """
    if terms is None:
        raise ValueError(
            "`weights` applies to terms, but this BatchOptimizer has none: build it with terms={name: Term(...)}"
        )
    if not isinstance(weights, Mapping):
        raise TypeError(f"`weights` must be a dict with one number a term, got {type(weights).__name__}")
    check_names("`weights`", weights, terms)
    return {
        name: replace(term, weight=_read_weight(f"`weights[{name!r}]`", weights[name])) for name, term in terms.items()
    }


def check_names(what: str, given: Mapping[Any, Any], names: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless `given` has each of `names`, and no other."""
    missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
    if missing or unknown:
        found = [f"{kind} {others}" for kind, others in (("lacks", missing), ("has unknown", unknown)) if others]
        raise ValueError(f"{what} {' and '.join(found)}: the terms are {list(names)}, and each needs one entry")


def _read_robust(loss: Any, scale: Any) -> tuple[str, float]:
    if loss not in LOSSES:
        raise ValueError(f"`loss` of a Term must be one of {list(LOSSES)}, got {loss!r}")
    number = _read_weight("`scale` of a Term", scale)
    if number == 0.0:
        raise ValueError(f"`scale` of a Term must be > 0, got {scale!r}")
    return loss, number


def _read_weight(what: str, value: Any) -> float:
    needed = f"{what} must be a finite number >= 0, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{needed}{': call .item() on it' if hasattr(value, 'item') else ''}")
    weight = float(value)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(needed)
    return weight
