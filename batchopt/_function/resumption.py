"""The state that is saved, and resuming from one after checks that it fits, before anything is changed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from batchopt._data.terms import Term, reweighed
from batchopt._function.step import Counters, History
from batchopt._mapreduce.speeds import Speeds
from batchopt.optim.choose import check_options

if TYPE_CHECKING:
    from batchopt._function.engine import Engine
    from batchopt.optim.rollback import Rollback

# Entries of every state; `weights` and `optimizer_class` are not in older ones, and `parallelize` only in those of
# `parallelize="auto"`, `compiled` in those of `compile`. Those of earlier versions may have `residuals`.
_ENTRIES = ("module", "optimizer", "history", "speeds", "seed")
ENTRIES = frozenset((*_ENTRIES, "optimizer_class", "weights", "residuals", "parallelize", "compiled", "course"))


def class_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return the name in a state for the class of an optimizer; prefixed by the library for torch's classes and
    ours."""
    if optimizer is None:
        return None
    kind, base = type(optimizer), getattr(optimizer, "base", None)
    library = kind.__module__.partition(".")[0]
    name = f"{library}.{kind.__name__}" if library in ("torch", "batchopt") else kind.__name__
    return f"{name} around {class_of(base)}" if isinstance(base, torch.optim.Optimizer) else name


def state_of(function: Engine, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the state of a function and its optimizer, as `BatchOptimizer.state_dict` documents it."""
    workers, history = function.workers, function.history
    return {
        "module": function.synced().module.state_dict(),
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "optimizer_class": class_of(optimizer),
        "history": history.counters.state_dict(),
        "speeds": list(workers.speeds.values),
        "seed": function.settings.seed,
        "weights": {name: term.weight for name, term in (function.reader.terms or {}).items()},
        **(function.tuner.state() if function.tuner and function.settings.automatic else {}),
        **({} if function.compilation is None else {"compiled": [*function.compilation.keys]}),
    }


def resume(
    function: Engine, optimizer: torch.optim.Optimizer | None, rollback: Rollback, state: dict[str, Any]
) -> None:
    """Continue from what `state_of` returned. Raises what `check_state` raises, and what torch raises for other shapes;
    then nothing is changed."""
    check_state(state, optimizer, function.settings.seed)
    weights = state.get("weights")  # absent in older states
    terms = reweighed(function.reader.terms, weights) if weights else function.reader.terms
    function.end_step()
    module = function.subject.module
    before = {key: value.clone() for key, value in module.state_dict().items() if torch.is_tensor(value)}
    rollback.take(optimizer)
    try:
        module.load_state_dict(state["module"])
        if optimizer is not None:
            # torch's optimizers would share tensors with the optimizer whose state this is
            optimizer.load_state_dict(deepcopy(state["optimizer"]))
            if all(value.dtype == state["module"][key].dtype for key, value in before.items()):
                _restore_dtypes(optimizer, state["optimizer"])
            check_options(optimizer)
        _adopt(function, state, terms)
    except BaseException:
        module.load_state_dict(before, strict=False)
        rollback.back()
        raise
    if state.get("parallelize") is not None and function.tuner and function.settings.automatic:
        function.tuner.resume(state["parallelize"], function.settings)


def _adopt(function: Engine, state: Mapping[str, Any], terms: dict[str, Term] | None) -> None:
    """Continue from the state; from its speeds only if the number of workers matches. A batch has to be loaded
    again."""
    workers, speeds = function.workers, state["speeds"]
    if state.get("residuals"):
        warnings.warn(
            "the state contains compression residuals, which are dropped: they begin with 0 in each run",
            RuntimeWarning,
            stacklevel=3,
        )
    compiled = state.get("compiled", ())
    if function.compilation is not None:
        function.compilation.expected = tuple(compiled)
    elif compiled and function.settings.fixed_bits:
        warnings.warn(
            "the evaluations before were compiled, and those from here are not: bits differ from here; give "
            "compile=True to resume with the same bits",
            RuntimeWarning,
            stacklevel=3,
        )
    function.reader.terms = terms
    function.history = History(Counters(**state["history"]), function.history.hook_results)
    function.forget()
    if len(speeds) == len(workers.infos) and not workers.speeds.fixed:
        workers.set_speeds(Speeds(tuple(speeds)))


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give each tensor in the optimizer's memory the saved dtype and value.

    torch casts them to the parameter's dtype: `mu_product` of NAdam is float32, and would continue as float64.
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        memory = optimizer.state.get(parameter, {})
        for key, saved in state["state"].get(name, {}).items():
            loaded = memory.get(key)
            if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != saved.dtype:
                memory[key] = saved.to(loaded.device, copy=True)


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
    _check_choice(state.get("parallelize"))
    _check_compiled(state.get("compiled", []))
    _check_course(state.get("course"))
    _check_optimizer(state["optimizer"], state.get("optimizer_class"), optimizer)


def _check_mapping(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a dict, as state_dict() returns; got {type(given).__name__}")


def _check_history(history: Any) -> None:
    _check_mapping("`history` of the state", history)
    known = [*Counters._fields]
    unknown = [name for name in history if name not in known]
    if unknown:
        raise ValueError(f"`history` of the state has unknown {unknown}: the entries are {known}")
    for name, value in history.items():
        if not _HISTORY.get(name, _is_count)(value):
            raise ValueError(f"`history` of the state has {name} {value!r}, which is not a valid value")


def _check_speeds(speeds: Any) -> None:
    is_sequence = isinstance(speeds, Sequence) and not isinstance(speeds, (str, bytes))
    if not is_sequence or not all(speed is None or (_is_number(speed) and 0 <= speed < math.inf) for speed in speeds):
        raise ValueError(f"`speeds` of the state must be a list of finite numbers >= 0, or None; got {speeds!r}")


def _check_choice(choice: Any) -> None:
    if choice is None:
        return
    _check_mapping("`parallelize` of the state", choice)
    found = choice.get("workers"), choice.get("threads") or 1, choice.get("samples")
    if not all(map(_is_count, found)) or 0 in found[:2]:
        raise ValueError(f"`parallelize` of the state is {choice!r}, which is not a valid value")
    devices = choice.get("devices", [])
    if not isinstance(devices, list) or not all(map(_is_device, devices)):
        raise ValueError(f"`parallelize` of the state has the devices {devices!r}, which is not a valid value")


def _check_course(given: Any) -> None:
    if given is None:
        return
    _check_mapping("`course` of the state", given)
    if not isinstance(given.get("rows"), list) or not isinstance(given.get("seconds"), float):
        raise ValueError("`course` of the state must have the `rows` and the `seconds` of a history")


def _check_compiled(keys: Any) -> None:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"`compiled` of the state must be a list of names; got {keys!r}")


def _is_device(name: Any) -> bool:
    """Tell whether this is the name of a device."""
    try:
        return isinstance(name, str) and bool(torch.device(name))
    except RuntimeError:
        return False


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Which entries of the history are valid; all others are counts.
_HISTORY: dict[str, Callable[[Any], bool]] = {
    "loss": _is_number,
    "paused": lambda value: isinstance(value, bool),
    "losses": lambda value: isinstance(value, str) and re.fullmatch("([0-9a-f]{64})?", value) is not None,
    "terms": lambda value: (
        isinstance(value, Mapping) and all(isinstance(k, str) and _is_number(v) for k, v in value.items())
    ),
}


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
                f"the optimizer of the state is {kind} and this one is {here}, which cannot resume from it: build the "
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
