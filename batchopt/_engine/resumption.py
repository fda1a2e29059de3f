"""The state that is saved, and resuming from one: it is tried, and undone if anything in it does not fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from batchopt._data.terms import reweighed
from batchopt._engine.choose import check_options
from batchopt._engine.step import Counters, Past
from batchopt._mapreduce.speeds import Speeds

if TYPE_CHECKING:
    from batchopt._engine.engine import Engine
    from batchopt._engine.rollback import Rollback

# The last three are in states of `parallelize="auto"`, `compile` and `history` alone.
ENTRIES = {"module", "optimizer", "optimizer_class", "history", "speeds", "seed", "weights"}
ENTRIES |= {"parallelize", "compiled", "course"}


def class_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return the name in a state for the class of an optimizer; prefixed by the library for torch's classes and
    ours."""
    if optimizer is None:
        return None
    kind, base = type(optimizer), getattr(optimizer, "base", None)
    library = kind.__module__.partition(".")[0]
    name = f"{library}.{kind.__name__}" if library in ("torch", "batchopt") else kind.__name__
    return f"{name} around {class_of(base)}" if isinstance(base, torch.optim.Optimizer) else name


def state_of(engine: Engine, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the state of a function and its optimizer, as `BatchOptimizer.state_dict` documents it."""
    return {
        "module": engine.synced().module.state_dict(),
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "optimizer_class": class_of(optimizer),
        "history": engine.past.counters.state_dict(),
        "speeds": list(engine.workers.speeds.values),
        "seed": engine.settings.seed,
        "weights": {name: term.weight for name, term in (engine.reader.terms or {}).items()},
        **engine.policies.state(engine.settings.automatic),
    }


@contextmanager
def resuming(
    engine: Engine, optimizer: torch.optim.Optimizer | None, rollback: Rollback, state: dict[str, Any]
) -> Iterator[None]:
    """Continue from what `state_of` returned, and do what the block does; a batch has to be loaded again.

    If anything of this fails, all is as before: `ValueError` or `TypeError` for a state of something else or of another
    form, and what torch raises for other shapes."""
    module, workers = engine.subject.module, engine.workers
    with _undone_on_failure(engine, optimizer, rollback):
        _check_origin(state, optimizer, engine.settings.seed)
        counters, speeds = Counters(**state["history"]).checked(), tuple(state["speeds"])
        if not all(speed is None or 0 <= speed < math.inf for speed in speeds):
            raise ValueError(f"`speeds` of the state must be finite numbers >= 0, or None; got {speeds}")
        if state["weights"]:
            engine.reader.terms = reweighed(engine.reader.terms, state["weights"])
        dtypes = {key: value.dtype for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        module.load_state_dict(state["module"])
        if optimizer is not None:
            # torch's optimizers would share tensors with the optimizer whose state this is
            optimizer.load_state_dict(deepcopy(state["optimizer"]))
            if all(state["module"][key].dtype == dtype for key, dtype in dtypes.items()):
                _restore_dtypes(optimizer, state["optimizer"])
            check_options(optimizer)
        compiled = tuple(state.get("compiled", ()))
        if compiled and engine.policies.compilation is None and engine.settings.fixed_bits:
            message = (
                "the evaluations before were compiled, and bits differ from here: compile=True keeps them the same"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        yield
        engine.policies.resume(engine, state)
        engine.past = Past(counters, engine.past.hook_results)
    engine.forget()
    if engine.policies.compilation is not None:
        engine.policies.compilation.expected = compiled
    if len(speeds) == len(workers.infos) and not workers.speeds.fixed:
        workers.set_speeds(Speeds(speeds))


@contextmanager
def _undone_on_failure(engine: Engine, optimizer: torch.optim.Optimizer | None, rollback: Rollback) -> Iterator[None]:
    """Put everything back if the block fails. The attributes of an optimizer, and of one within it, are kept as they
    are: `load_state_dict` makes others."""
    module, history, terms = engine.subject.module, engine.past, engine.reader.terms
    before = deepcopy(module.state_dict())
    parts = [] if optimizer is None else [optimizer, *vars(optimizer).values()]
    attributes = [(vars(part), {**vars(part)}) for part in parts if isinstance(part, torch.optim.Optimizer)]
    rollback.take(optimizer)
    try:
        yield
    except BaseException as error:
        engine.past, engine.reader.terms = history, terms
        for now, then in attributes:
            now.clear()
            now.update(then)
        module.load_state_dict(before, strict=False)
        rollback.back()
        if isinstance(error, (AttributeError, LookupError)):
            raise ValueError(f"the state is not what state_dict() returns: {type(error).__name__}: {error}") from error
        raise


def _check_origin(state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, seed: int) -> None:
    if state["seed"] != seed:
        raise ValueError(f"`seed` is {seed} here and {state['seed']!r} in the state: give the BatchOptimizer that one")
    there, here = state["optimizer_class"], class_of(optimizer)
    if there not in (here, *getattr(optimizer, "reads_states_of", ())):
        raise ValueError(
            f"the optimizer of the state is {there} and this one is {here}, which cannot resume from it: build the "
            f"BatchOptimizer with {there}, or take over the module alone: module.load_state_dict(state['module'])"
        )


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
