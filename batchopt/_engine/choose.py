"""Selecting the optimizer by a name, a factory or an instance."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from batchopt.optim import CG, LBFGS, SVRG, LevenbergMarquardt, SSBroyden
from batchopt.optim.minimizer import Minimizer

OptimizerChoice = str | torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None

# These take precedence over torch's optimizers of the same name.
_OURS: dict[str, type[torch.optim.Optimizer]] = {
    "lbfgs": LBFGS,
    "cg": CG,
    "ssbroyden": SSBroyden,
    "lm": LevenbergMarquardt,
}


# What others call them.
_MEANT = {"bfgs": "ssbroyden", "l-bfgs": "lbfgs", "l-bfgs-b": "lbfgs", "levenbergmarquardt": "lm"}


def _by_name() -> dict[str, type[torch.optim.Optimizer]]:
    found = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[name.lower()] = kind
    return {**found, **_OURS}


def check_choice(choice: OptimizerChoice, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise `ValueError` for an unknown name and for an instance that is not over `parameters` or has options that
    cannot work; `TypeError` for anything but a name, a factory or an optimizer."""
    if isinstance(choice, str):
        if choice.lower() not in (kinds := _by_name()):
            meant = _MEANT.get(choice.lower())
            hint = "" if meant is None else f": did you mean {meant!r}?"
            needed = f"`optimizer` must be one of {sorted(kinds)}, a factory or an instance"
            raise ValueError(f"{needed}; got {choice!r}{hint}")
    elif isinstance(choice, torch.optim.Optimizer):
        _check_optimizer(choice, parameters)
    elif isinstance(choice, type) and issubclass(choice, torch.optim.Optimizer):
        try:
            inspect.signature(choice).bind(parameters)
        except TypeError as error:
            name = choice.__name__
            raise TypeError(
                f"`optimizer` {name} cannot be made of parameters alone ({error}): pass lambda params: "
                f"{name}(params, ...), with what is missing"
            ) from None
    elif isinstance(choice, type) or not (choice is None or callable(choice)):
        raise TypeError(
            f"`optimizer` must be a name, a class of optimizers, a factory, an instance or None; got {choice!r}"
        )


def choose_optimizer(choice: OptimizerChoice, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """Return the optimizer over `parameters` that `choice` names, makes or is.

    A name is `"lbfgs"`, `"cg"`, `"ssbroyden"` or `"lm"`, or that of another class of `torch.optim`, in any case; names
    and classes use the defaults. The optimizer may omit some of `parameters`: those stay unchanged. Raises what
    `check_choice` raises, `ValueError` for parameters that are not the module's and for a learning rate or a number of
    iterations that cannot work, and `TypeError` for a factory that returns no optimizer.
    """
    check_choice(choice, parameters)
    if choice is None:
        return None
    optimizer: torch.optim.Optimizer
    if isinstance(choice, str):
        kind: Any = _by_name()[choice.lower()]  # whose signature is not that of the base class
        optimizer = kind(list(parameters))
    elif isinstance(choice, torch.optim.Optimizer):
        optimizer = choice
    else:
        optimizer = choice(list(parameters))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"the factory given as `optimizer` returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )
    _check_optimizer(optimizer, parameters)
    return optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    ours = {id(parameter) for parameter in parameters}
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours and p.requires_grad]
    if strange:
        raise ValueError(
            f"{len(strange)} parameters of `optimizer` are not trainable parameters of the module (first: shape "
            f"{tuple(strange[0].shape)}): nothing would compute their gradients"
        )
    check_options(optimizer)


def check_goes_by_any_gradient(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise `ValueError` for an optimizer that compares gradients with each other: compression errors exceed the
    differences that it evaluates."""
    if isinstance(optimizer, (Minimizer, SVRG, torch.optim.LBFGS)):
        raise ValueError(
            f"`compress` rounds gradients, and {type(optimizer).__name__} compares them with each other: use an "
            "optimizer of first order, as optimizer='sgd' or 'adam', or leave `compress` out"
        )


def check_options(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` for a learning rate or a number of iterations that cannot work."""
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if isinstance(lr, torch.Tensor) and lr.numel() == 1:
            lr = lr.item()
        if isinstance(lr, Real) and not 0 <= float(lr) < math.inf:
            raise ValueError(f"`optimizer` has lr {lr}: it must be finite and >= 0")
        if isinstance(optimizer, torch.optim.LBFGS) and group["max_iter"] < 1:
            raise ValueError(
                f"`optimizer` has max_iter {group['max_iter']}: it must be >= 1 (optimizer=None only evaluates)"
            )
