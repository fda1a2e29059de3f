"""Checks of the options of these optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch


class _Rule(NamedTuple):
    """A condition on a value of this type, and the words for it."""

    kind: type
    words: str
    holds: Callable[[Any], bool]


_POSITIVE = _Rule(Real, "positive and finite", lambda value: 0 < value < math.inf)
_NOT_NEGATIVE = _Rule(Real, ">= 0 and finite", lambda value: 0 <= value < math.inf)
_COUNT = _Rule(int, ">= 1", lambda value: value >= 1)
_LIMIT = _COUNT._replace(words=">= 1, or None: no limit")
_RULES = {
    "lr": _POSITIVE._replace(words="positive and finite: it is the first step of a line search"),
    "damping": _POSITIVE,
    "tolerance_grad": _NOT_NEGATIVE,
    "tolerance_change": _NOT_NEGATIVE,
    "l1": _NOT_NEGATIVE,
    "max_iter": _LIMIT,
    "max_eval": _LIMIT,
    "history_size": _COUNT,
    "geodesic": _Rule(bool, "", lambda value: True),
    "subspace": _COUNT,
    "dense": _Rule(int, ">= 0, a number of parameters", lambda value: value >= 0),
}
_KINDS = {Real: "a number", int: "an int", bool: "a bool"}
_CHOICES = {
    "line_search_fn": ("strong_wolfe", "armijo", None),
    "step": ("first", "longest"),
    "scaling": ("diagonal", "identity"),
    "when_data_change": ("forget", "keep"),
}


def as_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with one-element tensors (such as learning rates of torch optimizers) as numbers."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in options.items()
    }


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ValueError`, or `TypeError` for a wrong type, that names the first option that cannot work."""
    for name, value in options.items():
        if name in _CHOICES:
            check_choice(name, value, _CHOICES[name])
        elif name in _RULES and not (value is None and _RULES[name] is _LIMIT):
            kind, words, holds = _RULES[name]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"`{name}` must be {_KINDS[kind]}{f' {words}' * (kind is int)}; got {value!r}")
            if not holds(value):
                raise ValueError(f"`{name}` must be {words}; got {value}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `ValueError` for a value that is none of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}")
