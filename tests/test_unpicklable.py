"""What is said to keep an object from being sent, wherever in it that is."""

from __future__ import annotations

import abc
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
from batchopt._program.unpicklable import blame
from batchopt_workers.batch.batch import Batch, Columns, Part, Samples
from batchopt_workers.batch.weighting import Weighting
from batchopt_workers.evaluate.program import Program
from batchopt_workers.wire.packing import pack

LOCK = threading.Lock()
LOCK_TYPE = f"{type(LOCK).__module__}.{type(LOCK).__qualname__}".removeprefix("builtins.")


def by_value(function: Any) -> Any:
    """The function as if it were written in a script: pickled by value, with the globals that it uses."""
    function.__module__ = "__main__"
    return function


def held(name: str) -> str:
    """What is said of a lock that is found there."""
    return f"'{name}' ({LOCK_TYPE})"


# ---- functions


def test_a_variable_of_the_function_around() -> None:
    log = threading.Lock()

    def precode(worker: object) -> None:
        log.acquire()

    assert blame(precode) == held("log")


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


@by_value
def has_an_attribute_of_that_name(worker: Any) -> Any:
    """As in a script; the global is not used."""
    return worker.LOCK


def test_global_variables_that_a_script_uses() -> None:
    assert blame(uses_a_global) == held("LOCK")
    assert blame(uses_a_global_deep_inside) == held("LOCK")
    assert blame(calls_another) == held("uses_a_global.LOCK")
    assert blame(has_an_attribute_of_that_name) is None


def test_defaults_and_attributes_of_a_function() -> None:
    def keyword(worker: object, *, log: Any = LOCK) -> None: ...

    def marked(worker: object) -> None: ...

    vars(marked)["log"] = LOCK
    assert blame(lambda worker, count=1, log=LOCK: None) == held("log")
    assert blame(keyword) == held("log")
    assert blame(marked) == held("log")


def test_a_function_in_a_function() -> None:
    log = threading.Lock()

    def write() -> None:
        log.acquire()

    def precode(worker: object) -> None:
        write()

    assert blame(precode) == held("write.log")


class Recorder:
    """A hook with a state."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)

    def __call__(self, worker: object) -> None: ...

    def record(self, worker: object) -> None: ...


def precode(log: object, worker: object, **options: object) -> None:
    """A function that is pickled by its name."""


CALLABLES: dict[str, tuple[Any, str]] = {
    "an object": (Recorder(count=1, log=LOCK), "log"),
    "a method": (Recorder(log=LOCK).record, "self.log"),
    "a partial function": (functools.partial(precode, 1, option=LOCK), "keywords['option']"),
    "a partial function of the culprit": (functools.partial(precode, LOCK), "args[0]"),
    "a partial function that captures": (functools.partial(lambda worker, log: log, log=(LOCK,)), "keywords['log'][0]"),
    "a wrapped function": (functools.wraps(precode)(functools.partial(precode, [LOCK])), "args[0][0]"),
}


@pytest.mark.parametrize("function, path", CALLABLES.values(), ids=CALLABLES)
def test_other_things_that_can_be_called(function: Any, path: str) -> None:
    assert blame(function) == held(path)


# ---- kinds of culprits


def generator() -> Iterator[int]:
    """One value."""
    yield 1


class Rude:
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("never")


# ---- objects


class Encoder(nn.Module):
    """A module with something of its own."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.lock = own


def with_attribute_of_a_parameter() -> nn.Module:
    module = nn.Linear(2, 2)
    vars(module.weight)["owner"] = LOCK
    return module


def with_forward_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    log = threading.Lock()
    module[0].register_forward_hook(lambda *_: log.acquire())
    return module


def parametrized() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    nn.utils.parametrizations.weight_norm(module[0])
    vars(module[0])["log"] = LOCK
    return module


def linked(length: int) -> SimpleNamespace:
    node = SimpleNamespace()
    for _ in range(length):
        node = SimpleNamespace(next=node)
    return node


def in_a_circle(log: object = LOCK) -> SimpleNamespace:
    parent, child = SimpleNamespace(), SimpleNamespace()
    parent.child, child.parent = child, parent
    parent.log = log
    return parent


class Reduced:
    """Made again from an argument."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Reduced, (self.value,)


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a module": (lambda: Encoder(LOCK), "lock"),
    "deep in a module": (lambda: Program(nn.Sequential(Encoder(LOCK)), None, (None,), 0), "module.0.lock"),
    "a parameter": (lambda: {"net": with_attribute_of_a_parameter()}, "['net'].weight.owner"),
    "a parametrized module": (lambda: Program(parametrized(), None, (None,), 0), "module.0.log"),
    "a loss function": (lambda: Program(nn.Linear(1, 1), None, (lambda *_, log=LOCK: log,), 0), "loss_fns[0].log"),
    "a criterion": (
        lambda: Program(nn.Linear(1, 1), functools.partial(precode, option=LOCK), (None,), 0),
        "criterion.keywords['option']",
    ),
    "a sample": (lambda: batch(Samples([{"x": 1}, {"x": LOCK}])), "parts[0].inputs.data[1]['x']"),
    "a column": (lambda: batch(Columns({"x": torch.ones(2), "y": LOCK})), "parts[0].inputs.data['y']"),
    "options": (lambda: batch(Samples([1, 2]), [None, LOCK]), "parts[0].options[1]"),
    "a tuple": (lambda: (1, (2, LOCK)), "[1][1]"),
    "a circle": (in_a_circle, "log"),
    "a circle from its other side": (lambda: in_a_circle().child, "parent.log"),
}


def batch(inputs: Any, options: list[Any] | None = None) -> Batch:
    return Batch((Part(inputs, None, options, Weighting("mean", 2, None)),))


@pytest.mark.parametrize("make, path", OBJECTS.values(), ids=OBJECTS)
def test_the_way_to_it_is_said(make: Callable[[], Any], path: str) -> None:
    assert blame(make()) == held(path)


def test_a_forward_hook_of_a_module() -> None:
    found = blame(with_forward_hook())
    assert found is not None
    assert found.startswith("'0._forward_hooks[")
    assert found.endswith(f"].log' ({LOCK_TYPE})")


# ---- classes that are pickled by value


def local_module() -> nn.Module:
    log = threading.Lock()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> Any:
            log.acquire()
            return self.layer(x)

    return Net()


def local_class_with(**members: Any) -> Any:
    return type("Local", (), members)()


class Base(abc.ABC):
    """An abstract class."""

    @abc.abstractmethod
    def look(self) -> Any: ...


def abstract() -> Any:
    log = threading.Lock()

    class Local(Base, abc.ABC):
        __slots__ = ("first",)

        def look(self) -> Any:
            return log

    return Local()


CLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "a method": (local_module, "forward.log"),
    "a method deep in a module": (lambda: nn.Sequential(local_module()), "0.forward.log"),
    "a base class": (lambda: type("Derived", (type(local_class_with(log=LOCK)),), {})(), "log"),
}


@pytest.mark.parametrize("make, path", CLASSES.values(), ids=CLASSES)
def test_the_way_through_a_class_is_said(make: Callable[[], Any], path: str) -> None:
    assert blame(make()) == held(path)


# ---- limits


INNOCENT: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [1, 2.0, None, "a"],
    "a module": lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)),
    "a local module": lambda: type("Net", (nn.Linear,), {})(1, 1),
    "tensors": lambda: {"a": torch.ones(2), "b": torch.eye(2).to_sparse()},
    "a lambda": lambda: lambda worker: worker,
    "text in memory": io.BytesIO,
    "a circle": lambda: in_a_circle(None),
}


@pytest.mark.parametrize("make", INNOCENT.values(), ids=INNOCENT)
def test_what_can_be_sent_is_not_blamed(make: Callable[[], Any]) -> None:
    thing = make()
    pack(thing)
    assert blame(thing) is None


@pytest.mark.parametrize("thing", [LOCK, generator(), Rude()], ids=["lock", "generator", "rude"])
def test_what_is_itself_the_culprit_holds_none(thing: Any) -> None:
    assert blame(thing) is None
    assert blame([thing]) is not None


def test_what_is_nested_too_deeply_is_not_searched_to_its_end() -> None:
    chain = linked(100_000)
    assert blame(lambda worker: chain) is None


class Choosy:
    """Sends some of its attributes."""

    def __init__(self) -> None:
        self.kept_here, self.log = LOCK, threading.Lock()

    def __getstate__(self) -> Any:
        return {"log": self.log}


def test_what_is_not_sent_is_not_blamed() -> None:
    assert blame([Choosy()]) == held("[0].log")


class Unstable:
    """Can be pickled every other time."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> Any:
        self.times += 1
        if self.times % 2:
            raise KeyError("odd")
        return Unstable, ()


class Vicious:
    """Nothing about it can be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


@pytest.mark.parametrize("kind", [Unstable, Vicious])
def test_nothing_is_ever_raised(kind: type) -> None:
    assert blame(kind()) is None
    found = blame([kind()])
    assert found is None or isinstance(found, str)


def test_a_cached_function_of_the_script_is_sent_like_any_other() -> None:
    @functools.lru_cache(maxsize=3)
    def doubled(number: int) -> int:
        return 2 * number

    doubled.__module__, doubled.__qualname__ = "__main__", "doubled"
    with BatchOptimizer(nn.Linear(1, 1), nn.MSELoss(), optimizer=None, parallelize=2) as opt:
        found = opt.run_on_workers(lambda worker: (doubled(worker.rank), doubled.cache_parameters()["maxsize"]))
    assert found == [(0, 3), (2, 3)]
