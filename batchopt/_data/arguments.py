"""Checks of arguments: each error names the argument, its value, and what is required."""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.speeds import Speeds


def read_count(name: str, value: Any, least: int = 1) -> int:
    """Return an int that is `least` or more. Raise `TypeError` or `ValueError`, like all readers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be >= {least}, got {value}")
    return value


def read_parallelize(value: Any) -> int:
    """Return the number of workers; `"auto"` is one per usable core."""
    return usable_cores() if value == "auto" else read_count("parallelize", value)


def read_count_of_state(name: str, value: Any) -> int:
    """Return a counter of a saved state: any non-negative int. Raise `ValueError`."""
    if type(value) is not int or value < 0:
        raise ValueError(f"`{name}` of a state must be an int >= 0, got {value!r}")
    return value


def read_bool(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {type(value).__name__} {value!r}")
    return value


def _read_chunk_size(name: str, value: Any) -> int | str:
    return value if value == "auto" else read_count(name, value)


def _read_compile(name: str, value: Any) -> bool | str:
    if value is not None and not isinstance(value, bool) and value != "auto":
        raise ValueError(f"`{name}` must be None, False, True or 'auto', got {value!r}")
    return value or False


def _read_history(name: str, value: Any) -> int | Mapping[str, NumberFunction]:
    """Return the interval of kept iterations; 0: none are. Or functions of the module whose values are kept, too."""
    if isinstance(value, Mapping):
        return read_numbers(name, value)
    return int(value) if isinstance(value, bool) else read_count(name, value)


# `function(module)`: a number, or a tensor of one or of shape `(k,)`.
NumberFunction = Callable[[Any], Any]
# What lines about iterations have of their own.
_OWN = set("step iteration evaluations f seconds terms gradient change length trials loss lr".split())


def read_numbers(name: str, value: Any) -> dict[str, NumberFunction]:
    """Return functions of the module by the names of their values. Raise `TypeError`, and `ValueError` for a name that
    a row of the history has."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"`{name}` must be a dict of names and functions of the module, got {value!r}")
    for key, function in value.items():
        if key in _OWN:
            raise ValueError(f"`{name}` has {key!r}, which rows have of their own: call it something else")
        check_callable(f"{name}[{key!r}]", function, ("module",))
    return dict(value)


def read_positive(name: str, value: Any, what: str = "number") -> float:
    """Return a positive finite number. Raise `TypeError` for anything but a number, `ValueError` for any other one."""
    needed = f"`{name}` must be a positive {what}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(needed)
    if not 0 < float(value) < math.inf:
        raise ValueError(needed)
    return float(value)


def read_floating(name: str, value: Any, form: str = "") -> torch.Tensor:
    """Return a tensor of floating-point numbers; `form`: its shape in words, for errors."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value
    kind = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TypeError(f"`{name}` must be a tensor of floating-point numbers{form}; got {kind}")


def read_columns(v: torch.Tensor, size: int) -> torch.Tensor:
    """Return `v` if it is a vector of this size, or has columns of this size."""
    if v.shape[:1] != (size,) or v.dim() > 2:
        raise ValueError(f"`v` must have shape ({size},), as `parameters`, or ({size}, k); got {tuple(v.shape)}")
    return v


def read_nonfinite(value: Any) -> tuple[str, tuple[type[Exception], ...]]:
    """Return what happens where a loss is not finite, and the classes of exceptions that mean such a loss."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    kinds = tuple([one for one in given if isinstance(one, type) and issubclass(one, Exception)])
    actions = [one for one in given if one not in kinds]
    if len(actions) > 1 or any(action not in ("raise", "return") for action in actions):
        raise ValueError(
            "`on_nonfinite` must be 'raise' or 'return', classes of exceptions that mean such a loss, or a tuple of "
            f"both, as ('return', ArithmeticError); got {value!r}"
        )
    return (actions or ["raise"])[0], kinds


def _one_of(*values: str | int) -> Reader:
    def read(name: str, value: Any) -> Any:
        if type(value) is not type(values[0]) or value not in values:
            needed = f"{', '.join(map(repr, values[:-1]))} or {values[-1]!r}"
            raise ValueError(f"`{name}` must be {needed}, got {value!r}")
        return value

    return read


def _read_signals(name: str, value: Any) -> tuple[signal.Signals, ...]:
    """Return the signals of these names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"`{name}` must be a sequence of names of signals, as ('SIGTERM', 'SIGUSR1'), got {value!r}")
    for one in value:
        if one not in signal.Signals.__members__ or one in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise ValueError(f"`{name}` has {one!r}: it must be the name of a signal that can be handled, as 'SIGTERM'")
    return tuple(dict.fromkeys(signal.Signals[one] for one in value))


Reader = Callable[[str, Any], Any]
# Arguments that may be None, and those that may not.
_OPTIONAL: dict[str, Reader] = {
    **dict.fromkeys(("threads_per_worker", "batch_size"), read_count),
    "chunk_size": _read_chunk_size,
    **dict.fromkeys(("timeout", "time_limit"), functools.partial(read_positive, what="number of seconds or None")),
    "train": read_bool,
    **{"max_restarts": functools.partial(read_count, least=0)},
}
_NEEDED: dict[str, Reader] = {
    **dict.fromkeys(("cache", "check_cut", "shuffle", "drop_last", "graph"), read_bool),
    **{"seed": functools.partial(read_count, least=0), "verbose": _one_of(0, 1, 2, 3)},
    **{
        "history": _read_history,
        "compile": _read_compile,
        "on_nonfinite": _one_of("raise", "return"),
    },
    **{"stop_on": _read_signals, "on_interrupt": _one_of("keep", "undo")},
}


def read(name: str, value: Any) -> Any:
    """Return the argument of this name as a plain value."""
    return _NEEDED[name](name, value) if name in _NEEDED else None if value is None else _OPTIONAL[name](name, value)


def read_devices(devices: Any, parallelize: Any) -> tuple[torch.device, ...] | None:
    """Return the device of each worker; None: this machine's cores. `parallelize` is 1, their number, or "auto".

    Raise `TypeError` or `ValueError` for anything else, and for an accelerator that does not exist.
    """
    if devices is None:
        return None
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f"`devices` must be a sequence, one device a worker, got {type(devices).__name__} {devices!r}")
    if parallelize not in (1, "auto", len(devices)):
        raise ValueError(f"`devices` has {len(devices)} entries for {parallelize} workers: leave `parallelize` out")
    if not devices:
        raise ValueError("`devices` is empty: name the device of each worker, as ['cuda:0', 'cuda:1']")
    try:
        found = tuple(torch.device(device) for device in devices)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"`devices` has an entry that is no device: {error}") from error
    for device in found:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"`devices` must be 'cpu' or 'cuda:<index>', got '{device}'")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"`devices` has '{device}', and this machine has {torch.cuda.device_count()} CUDA devices")
    return tuple(map(_numbered, found))


def _numbered(device: torch.device) -> torch.device:
    """Return the device with its number: `cuda` alone is the one of this rank, if there are several of both."""
    if device.type != "cuda" or device.index is not None:
        return device
    count = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % count if count > 1 else 0)


def read_speeds(speeds: Any, workers: int | None) -> Speeds | None:
    """Return the given speeds, one per worker, which stay fixed; None: they are measured. `workers` None: their number
    is not yet known."""
    if speeds is None:
        return None
    if workers is None and isinstance(speeds, Sequence):
        workers = len(speeds)
    if isinstance(speeds, str) or not isinstance(speeds, Sequence):
        raise TypeError(f"`speeds` must be a sequence of {workers} numbers or None, got {type(speeds).__name__}")
    if len(speeds) != workers:
        raise ValueError(f"`speeds` has {len(speeds)} entries for {workers} workers")
    if not all(isinstance(speed, Real) and not isinstance(speed, bool) for speed in speeds):
        raise TypeError(f"`speeds` must be numbers, got {list(speeds)}")
    values = tuple(float(speed) for speed in speeds)
    if not all(math.isfinite(speed) and speed >= 0 for speed in values) or not any(values):
        raise ValueError(f"`speeds` must be finite and >= 0, and not all 0; got {list(speeds)}")
    return Speeds(values, fixed=True)


# The parameters with which functions of these names are called.
_PARAMETERS = {
    **{"precode": ("worker",), "collate_fn": ("samples",), "denominators": ("inputs", "targets")},
    **dict.fromkeys(("prehook", "posthook"), ("worker", "sample")),
    **dict.fromkeys(("loss_fn", "residual"), ("module", "inputs", "targets")),
    **{"transform": ("outputs",), "optimizer": ("params",)},
}


def check_callable(name: str, function: Any, parameters: Sequence[str] = ()) -> None:
    """Raise `TypeError` unless `function` is None or can be called with `parameters`, by default as any argument of
    this name."""
    if function is None:
        return
    parameters = parameters or _PARAMETERS[name]
    needed = f"`{name}` must be callable as {name}({', '.join(parameters)})"
    if not callable(function):
        raise TypeError(f"{needed}; got {type(function).__name__} {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        raise TypeError(f"{needed}; got a function of {signature}{_place(function)}") from None


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def check_loss_fn(loss_fn: Any) -> None:
    """Raise `TypeError` unless it is None, or a callable with the right parameters and not a class."""
    if isinstance(loss_fn, type):
        raise TypeError(f"`loss_fn` must be a function of (module, inputs, targets); got the class {loss_fn.__name__}")
    check_callable("loss_fn", loss_fn)


def check_criterion(criterion: Any, loss_fn: Any) -> None:
    """Raise `TypeError` or `ValueError` unless at most one of the two is given, callable and not a class."""
    if criterion is not None and loss_fn is not None:
        raise ValueError(
            "`criterion` and `loss_fn` are both given: the loss is either criterion(module(inputs), targets) or "
            "loss_fn's"
        )
    if isinstance(criterion, type):
        raise TypeError(
            f"`criterion` must be an instance; got the class {criterion.__name__} - did you mean "
            f"{criterion.__name__}()?"
        )
    if criterion is not None and not callable(criterion):
        raise TypeError(f"`criterion` must be callable as criterion(output, targets); got {type(criterion).__name__}")
    check_loss_fn(loss_fn)
    if isinstance(criterion, torch.nn.Module) and any(p.requires_grad for p in criterion.parameters()):
        raise ValueError(
            "`criterion` has trainable parameters, which would not be trained: make it a part of the module, with "
            "loss_fn"
        )


def short(thing: Any) -> str:
    """Return a few words for an argument in a repr: the name of a function or class, the kind of a large module."""
    if isinstance(thing, type) or inspect.isroutine(thing):
        return str(thing.__name__)
    if isinstance(thing, torch.Tensor):
        return f"shape {tuple(thing.shape)}, {str(thing.dtype).removeprefix('torch.')}"
    shown = repr(thing)
    return type(thing).__name__ if len(shown) > 60 or "\n" in shown or " at 0x" in shown else shown
