"""What is said to keep an object from being sent, wherever in it that is."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer

LOCK = threading.Lock()
LOCK_TYPE = f"{type(LOCK).__module__}.{type(LOCK).__qualname__}".removeprefix("builtins.")


def said(precode: Callable[..., object]) -> str:
    """What is said of what cannot be sent."""
    with pytest.raises(TypeError, match="`precode` cannot be sent to worker processes: ") as caught:
        BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), parallelize=2, precode=precode)
    return str(caught.value).partition(": ")[2]


def ready(thing: object, worker: object, **options: object) -> None:
    """A function that is pickled by its name."""


def held(name: str) -> str:
    """What is said of a lock that is found there."""
    return f"it captures '{name}' ({LOCK_TYPE})"


# ---- functions


def by_value(function: Any) -> Any:
    """The function as if it were written in a script: pickled by value, with the globals that it uses."""
    function.__module__ = "__main__"
    return function


@by_value
def uses_a_global(worker: object) -> None:
    """As in a script."""
    LOCK.acquire()


@by_value
def uses_a_global_deep_inside(worker: object) -> Any:
    """As in a script."""

    def inner() -> Any:
        return [LOCK for _ in range(3)]

    return inner


@by_value
def calls_another(worker: object) -> None:
    """As in a script."""
    uses_a_global(worker)


def captures(log: object) -> Any:
    def write() -> object:
        return log

    return lambda worker: write()


def marked() -> Any:
    def function(worker: object) -> None: ...

    vars(function)["log"] = LOCK
    return function


class Recorder:
    """A hook with a state."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)

    def __call__(self, worker: object) -> None: ...

    def record(self, worker: object) -> None: ...


CALLABLES: dict[str, tuple[Any, str]] = {
    "a global": (uses_a_global, "LOCK"),
    "a global deep inside": (uses_a_global_deep_inside, "LOCK"),
    "a global of another function": (calls_another, "uses_a_global.LOCK"),
    "a variable of a function in a function": (captures(LOCK), "write.log"),
    "a default": (lambda worker, count=1, log=LOCK: None, "log"),
    "an attribute": (marked(), "log"),
    "an object": (Recorder(count=1, log=LOCK), "log"),
    "a method": (Recorder(log=LOCK).record, "self.log"),
    "a partial function": (functools.partial(ready, 1, option=LOCK), "keywords['option']"),
}


@pytest.mark.parametrize("function, path", CALLABLES.values(), ids=CALLABLES)
def test_what_a_function_holds_is_named(function: Any, path: str) -> None:
    assert said(function).startswith(held(path))


# ---- objects, and classes that are pickled by value


class Choosy:
    """Sends some of its attributes."""

    def __init__(self) -> None:
        self.kept_here, self.log = LOCK, LOCK

    def __getstate__(self) -> Any:
        return {"log": self.log}


def with_attribute_of_a_parameter() -> nn.Module:
    module = nn.Linear(2, 2)
    vars(module.weight)["owner"] = LOCK
    return module


def parametrized() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    nn.utils.parametrizations.weight_norm(module[0])
    vars(module[0])["log"] = LOCK
    return module


def in_a_circle(log: object = LOCK) -> SimpleNamespace:
    parent, child = SimpleNamespace(), SimpleNamespace()
    parent.child, child.parent = child, parent
    parent.log = log
    return parent


def local_module() -> nn.Module:
    log = LOCK

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            log.acquire()
            return x

    return Net()


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a parameter": (lambda: {"net": with_attribute_of_a_parameter()}, "['net'].weight.owner"),
    "a parametrized module": (parametrized, ".0.log"),
    "a tuple": (lambda: (1, (2, LOCK)), "[1][1]"),
    "a circle": (lambda: in_a_circle().child, ".parent.log"),
    "what alone is sent": (Choosy, ".log"),
    "a method of a class": (lambda: nn.Sequential(local_module()), ".0.forward.log"),
    "a base class": (lambda: type("Derived", (type("Local", (), {"log": LOCK}),), {})(), ".log"),
}


@pytest.mark.parametrize("make, path", OBJECTS.values(), ids=OBJECTS)
def test_the_way_to_it_is_said(make: Callable[[], Any], path: str) -> None:
    assert said(functools.partial(ready, make())).startswith(held(f"args[0]{path}"))


# ---- limits


def generator() -> Iterator[int]:
    yield 1


class Rude:
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class Vicious:
    """Nothing about it can be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def test_what_has_no_such_part_or_too_many_is_an_error_too() -> None:
    for thing in (generator(), Rude()):
        assert said(functools.partial(ready, thing)).startswith("it captures 'args[0]'")
    chain = SimpleNamespace()
    for _ in range(100_000):
        chain = SimpleNamespace(next=chain)
    for thing in (chain, Vicious()):
        said(functools.partial(ready, thing))


def test_what_can_be_sent_is_not_blamed_and_a_cached_function_of_the_script_is_sent_like_any_other() -> None:
    @functools.lru_cache(maxsize=3)
    def doubled(number: int) -> int:
        return 2 * number

    @functools.lru_cache(maxsize=3)
    def within(number: int) -> int:  # by its name it would be looked for in this module
        return 3 * number

    doubled.__module__, doubled.__qualname__ = "__main__", "doubled"
    innocent = [1, nn.BatchNorm1d(1), type("Net", (nn.Linear,), {})(1, 1), torch.eye(2).to_sparse(), io.BytesIO()]
    with BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        for thing in (*innocent, in_a_circle(None), lambda worker: worker):
            assert opt.run_on_workers(functools.partial(ready, thing)) == [None, None]
        found = opt.run_on_workers(lambda worker: (doubled(worker.rank), doubled.cache_parameters()["maxsize"]))
        assert opt.run_on_workers(lambda worker: within(worker.rank)) == [0, 3]
    assert found == [(0, 3), (2, 3)]
