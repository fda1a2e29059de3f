"""Checks of the options of these optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

LINE_SEARCHES = ("strong_wolfe", "armijo", None)
SCALINGS = (None, "diagonal", "identity")
DATA_CHANGES = ("forget", "keep")


def as_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with one-element tensors (such as learning rates of torch optimizers) as numbers."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in options.items()
    }


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ValueError`, or `TypeError` for a wrong type, that names the first option that cannot work."""
    for name, value in options.items():
        if name == "lr":
            _check_number(name, value)
            if not 0 < value < math.inf:
                raise ValueError(
                    f"`lr` must be positive and finite: it is the first step of a line search; got {value}"
                )
        elif name == "damping":
            _check_number(name, value)
            if not 0 < value < math.inf:
                raise ValueError(f"`damping` must be positive and finite; got {value}")
        elif name.startswith("tolerance") or name == "l1":
            _check_number(name, value)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be >= 0 and finite; got {value}")
        elif name in ("max_iter", "max_eval", "history_size"):
            if value is None and name != "history_size":
                continue  # no limit
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"`{name}` must be an int >= 1{' or None: no limit' * (name != 'history_size')}; got {value!r}"
                )
            if value < 1:
                raise ValueError(
                    f"`{name}` must be >= 1{', or None: no limit' * (name != 'history_size')}; got {value}"
                )
        elif name == "line_search_fn":
            check_choice(name, value, LINE_SEARCHES)
        elif name == "scaling":
            check_choice(name, value, SCALINGS)
        elif name == "geodesic" and not isinstance(value, bool):
            raise TypeError(f"`geodesic` must be a bool; got {value!r}")
        elif name == "dense" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise TypeError(f"`dense` must be an int >= 0, a number of parameters; got {value!r}")
        elif name == "when_data_change":
            check_choice(name, value, DATA_CHANGES)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `ValueError` for a value that is none of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number; got {value!r}")
