"""Checks that a saved state fits this optimizer, before anything is changed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from batchopt._function.counters import Counters

# Entries of every state; `weights`, `residuals` and `optimizer_class` are not in older ones.
_ENTRIES = ("module", "optimizer", "history", "speeds", "seed")
_COUNTS = ("evaluations", "batches", "samples", "steps", "products")


def class_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return the name in a state for the class of an optimizer; prefixed by the library for torch's classes and
    ours."""
    if optimizer is None:
        return None
    kind, base = type(optimizer), getattr(optimizer, "base", None)
    library = kind.__module__.partition(".")[0]
    name = f"{library}.{kind.__name__}" if library in ("torch", "batchopt") else kind.__name__
    return f"{name} around {class_of(base)}" if isinstance(base, torch.optim.Optimizer) else name


def check_state(state: Any, optimizer: torch.optim.Optimizer | None, seed: int) -> None:
    """Raise `ValueError` or `TypeError`, which name the entry, unless a BatchOptimizer with that `optimizer` and `seed`
    can continue from `state`, as far as its form shows."""
    _check_mapping("the state", state)
    missing = [name for name in _ENTRIES if name not in state]
    if missing:
        raise ValueError(f"the state lacks {missing}: it is not what state_dict() returns")
    if state["seed"] != seed:
        raise ValueError(
            f"`seed` is {seed} here and {state['seed']!r} in the state: build the BatchOptimizer with that seed"
        )
    _check_mapping("`module` of the state", state["module"])
    _check_history(state["history"])
    _check_speeds(state["speeds"])
    _check_optimizer(state["optimizer"], state.get("optimizer_class"), optimizer)


def _check_mapping(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a dict, as state_dict() returns; got {type(given).__name__}")


def check_residuals(residuals: Any, x: torch.Tensor) -> None:
    """Raise `ValueError` or `TypeError` unless these can be rounding errors of compressed gradients of `x`."""
    _check_mapping("`residuals` of the state", residuals)
    for cell, residual in residuals.items():
        is_right = type(cell) is int and cell >= 0 and isinstance(residual, torch.Tensor) and residual.shape == x.shape
        if not is_right or residual.dtype != torch.promote_types(x.dtype, torch.float32):
            raise ValueError(
                f"`residuals` of the state has {cell!r}, which is none of a gradient with {len(x)} elements"
            )


def _check_history(history: Any) -> None:
    _check_mapping("`history` of the state", history)
    known = [field.name for field in fields(Counters)]
    unknown = [name for name in history if name not in known]
    if unknown:
        raise ValueError(f"`history` of the state has unknown {unknown}: the entries are {known}")
    for name, value in history.items():
        if name in _COUNTS:
            is_right = type(value) is int and value >= 0
        elif name == "loss":
            is_right = _is_number(value)
        elif name == "losses":
            is_right = isinstance(value, str) and re.fullmatch("([0-9a-f]{64})?", value) is not None
        else:
            is_right = isinstance(value, Mapping) and all(
                isinstance(k, str) and _is_number(v) for k, v in value.items()
            )
        if not is_right:
            raise ValueError(f"`history` of the state has {name} {value!r}, which no BatchOptimizer wrote")


def _check_speeds(speeds: Any) -> None:
    is_sequence = isinstance(speeds, Sequence) and not isinstance(speeds, (str, bytes))
    if not is_sequence or not all(speed is None or (_is_number(speed) and 0 <= speed < math.inf) for speed in speeds):
        raise ValueError(f"`speeds` of the state must be a list of finite numbers >= 0, or None; got {speeds!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_optimizer(state: Any, kind: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if (state is None) != (optimizer is None):
        raise ValueError("the state and this BatchOptimizer must both have an optimizer, or neither")
    if optimizer is None:
        return
    _check_mapping("`optimizer` of the state", state)
    groups = state.get("param_groups")
    if not isinstance(state.get("state"), Mapping) or not isinstance(groups, Sequence):
        raise ValueError(
            "`optimizer` of the state lacks its `state` or its `param_groups`: it is no state of an optimizer"
        )
    for group in groups:
        _check_mapping("each of `param_groups` of the state", group)
    for memory in state["state"].values():
        _check_mapping("what the optimizer of the state remembers of each parameter", memory)
    here = class_of(optimizer)
    if kind is not None:
        if kind != here and kind not in getattr(optimizer, "reads_states_of", ()):
            raise ValueError(
                f"the optimizer of the state is {kind} and this one is {here}, which cannot go on from it: build the "
                f"BatchOptimizer with {kind}, or take over the module alone: module.load_state_dict(state['module'])"
            )
        return
    for group, other in zip(optimizer.param_groups, groups, strict=False):
        lacking = sorted(name for name in group if name not in other)
        if lacking:
            raise ValueError(
                f"the optimizer of the state does not say its class, and lacks the options {lacking} of {here}: it is "
                "of another class; build the BatchOptimizer with the optimizer that wrote it"
            )
