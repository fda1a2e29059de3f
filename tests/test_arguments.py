"""Checks of arguments: what passes, and that each refusal names the argument, what it was, and what is needed."""

from __future__ import annotations

import functools
import inspect
import math
import re
from dataclasses import fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchopt import BatchOptimizer
from batchopt._data.arguments import (
    check_callable,
    check_criterion,
    check_hooks,
    read_on_nonfinite,
    read_optional_count,
    read_parallelize,
    read_restarts,
    read_seed,
    read_speeds,
    read_timeout,
    read_verbose,
)
from batchopt._function.settings import Settings
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.speeds import Speeds
from batchopt.backends import backend_class
from batchopt.backends.base import Setup
from batchopt.backends.process.startup import check_room


def test_parallelize_is_a_count_or_auto() -> None:
    assert read_parallelize(1) == 1
    assert read_parallelize(17) == 17
    assert read_parallelize("auto") == usable_cores()


@pytest.mark.parametrize(
    "value, error, message",
    [
        (0, ValueError, r"`parallelize` must be >= 1, got 0"),
        (-1, ValueError, r"`parallelize` must be >= 1, got -1"),
        (2.5, TypeError, r"`parallelize` must be an int, got float 2\.5"),
        ("4", TypeError, r"`parallelize` must be an int, got str '4'"),
        (True, TypeError, r"`parallelize` must be an int, got bool True"),
        (None, TypeError, r"`parallelize` must be an int, got NoneType None"),
    ],
)
def test_no_other_parallelize_is_taken(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_parallelize(value)


def test_the_serial_backend_has_one_worker() -> None:
    assert backend_class("process").read_workers(3) == 3
    assert backend_class("serial").read_workers(1) == 1
    with pytest.raises(ValueError, match=r"`backend` 'serial' is this process alone: use parallelize=1, got 2"):
        backend_class("serial").read_workers(2)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"`backend` must be one of \[.*'process'.*'serial'.*\], got 'threads'"):
        backend_class("threads")


@pytest.mark.parametrize(
    "workers, memory, descriptors",
    [
        (32, 24e9, 1024),
        (8, 2e9, 256),
        (2, 440_000_000, 14),
        (100, 24e9, math.inf),
        (1000, 1e12, 20_000),
    ],
)
def test_workers_that_a_machine_has_room_for_are_taken(workers: int, memory: float, descriptors: float) -> None:
    check_room(workers, int(memory), descriptors)


@pytest.mark.parametrize(
    "workers, memory, descriptors, message",
    [
        (
            10_000,
            24e9,
            1024,
            r"2200\.0 GB of memory and 70000 open files; this machine has 24\.0 GB, and `ulimit -n` all",
        ),
        (10_000, 24e9, 1024, r"allows 1024 files: use at most 109, or 'auto' for one worker a usable core"),
        (10_000, 1e15, 1024, r"allows 1024 files: use at most 146,"),
        (
            200,
            1e15,
            1024,
            r"`parallelize` 200 needs about 44\.0 GB of memory and 1400 open files; .*: use at most 146,",
        ),
        (200, 24e9, math.inf, r"has 24\.0 GB, and `ulimit -n` allows inf files: use at most 109,"),
        (3, 4.4e8, 1024, r"`parallelize` 3 needs about 0\.7 GB of memory .* has 0\.4 GB, .*: use at most 2,"),
        (2, 1e6, 4, r"use at most 1,"),
    ],
)
def test_more_workers_than_a_machine_has_room_for_are_refused_with_the_numbers(
    workers: int, memory: float, descriptors: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_room(workers, int(memory), descriptors)


def test_the_machine_at_hand_has_no_room_for_ten_thousand_processes() -> None:
    with pytest.raises(ValueError, match=r"^`parallelize` 10000 needs about 2200\.0 GB of memory and 70000 open files"):
        backend_class("process").read_workers(10_000)


@pytest.mark.parametrize("value", [1, 0.5, 1e-9, 10**6, np.float32(2.5), np.int64(3), Fraction(1, 4)])
def test_a_timeout_is_a_positive_number_of_seconds(value: Any) -> None:
    found = read_timeout(value)
    assert type(found) is float
    assert found == value


def test_a_timeout_may_be_left_to_measurement() -> None:
    assert read_timeout(None) is None


@pytest.mark.parametrize(
    "value, error",
    [
        ("5s", TypeError),
        ("5", TypeError),
        (True, TypeError),
        ([1], TypeError),
        (1j, TypeError),
        (0, ValueError),
        (-1.5, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
    ],
)
def test_no_other_timeout_is_taken(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        read_timeout(value)
    assert str(caught.value) == f"`timeout` must be a positive number of seconds or None, got {value!r}"


def test_restarts_are_counted_from_zero_and_four_a_worker_by_default() -> None:
    assert [read_restarts(value) for value in (None, 0, 1, 100)] == [None, 0, 1, 100]
    assert [Setup.restarts_of(SimpleNamespace(restarts=value), 3) for value in (None, 0, 7)] == [12, 0, 7]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value, error, message",
    [
        (-1, ValueError, r"`max_restarts` must be >= 0, got -1"),
        (2.5, TypeError, r"`max_restarts` must be an int, got float 2\.5"),
        ("4", TypeError, r"`max_restarts` must be an int, got str '4'"),
        (True, TypeError, r"`max_restarts` must be an int, got bool True"),
    ],
)
def test_no_other_number_of_restarts_is_taken(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_restarts(value)


def test_an_optional_count_is_positive_or_none() -> None:
    assert read_optional_count("chunk_size", None) is None
    assert read_optional_count("chunk_size", 1) == 1
    with pytest.raises(ValueError, match=r"`chunk_size` must be >= 1, got 0"):
        read_optional_count("chunk_size", 0)
    with pytest.raises(TypeError, match=r"`chunk_size` must be an int, got float 2\.0"):
        read_optional_count("chunk_size", 2.0)


def test_a_seed_is_a_non_negative_int() -> None:
    assert read_seed(0) == 0
    assert read_seed(2**63) == 2**63
    with pytest.raises(ValueError, match=r"`seed` must be >= 0, got -1"):
        read_seed(-1)
    with pytest.raises(TypeError, match=r"`seed` must be an int, got NoneType None"):
        read_seed(None)


@pytest.mark.parametrize("value", ["raise", "return"])
def test_what_is_not_finite_is_raised_or_returned(value: str) -> None:
    assert read_on_nonfinite(value) == value


@pytest.mark.parametrize("value", ["ignore", "Raise", "", None, True, ["raise"], {}])
def test_nothing_else_is_done_with_what_is_not_finite(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        read_on_nonfinite(value)
    assert str(caught.value) == f"`on_nonfinite` must be 'raise' or 'return', got {value!r}"


@pytest.mark.parametrize("verbose", [0, 1, 2, 3])
def test_how_much_is_said_has_four_levels(verbose: int) -> None:
    assert read_verbose(verbose) == verbose


@pytest.mark.parametrize("verbose", [-1, 4, 1.0, 1.5, "1", True, None])
def test_no_other_level_is_taken(verbose: Any) -> None:
    with pytest.raises(ValueError, match=rf"`verbose` must be 0, 1, 2 or 3, got {verbose!r}"):
        read_verbose(verbose)


@pytest.mark.parametrize(
    "speeds", [[1, 2.5, 0], (1, 2.5, 0), [np.int64(1), np.float32(2.5), Fraction(0)]], ids=["list", "tuple", "numbers"]
)
def test_speeds_given_are_one_number_a_worker_and_fixed(speeds: Any) -> None:
    assert read_speeds(speeds, 3) == Speeds((1.0, 2.5, 0.0), fixed=True)


def test_speeds_may_be_left_to_measurement() -> None:
    assert read_speeds(None, 3) is None


@pytest.mark.parametrize(
    "speeds, error, message",
    [
        ([1, 2, 3], ValueError, r"`speeds` has 3 entries for 2 workers"),
        ([], ValueError, r"`speeds` has 0 entries for 2 workers"),
        ([1, -1], ValueError, r"`speeds` must be finite and >= 0, and not all 0; got \[1, -1\]"),
        ([0, 0], ValueError, r"`speeds` must be .*got \[0, 0\]"),
        ([1, math.inf], ValueError, r"`speeds` must be .*got \[1, inf\]"),
        ([1, math.nan], ValueError, r"`speeds` must be .*got \[1, nan\]"),
        ("12", TypeError, r"`speeds` must be a sequence of 2 numbers or None, got str"),
        (2.0, TypeError, r"`speeds` must be a sequence of 2 numbers or None, got float"),
        ({1: 1, 2: 2}, TypeError, r"`speeds` must be a sequence of 2 numbers or None, got dict"),
        (["1", 1], TypeError, r"`speeds` must be numbers, got \['1', 1\]"),
        ([None, 1], TypeError, r"`speeds` must be numbers, got \[None, 1\]"),
        ([1j, 1], TypeError, r"`speeds` must be numbers, got \[1j, 1\]"),
        ([[1], [1]], TypeError, r"`speeds` must be numbers, got \[\[1\], \[1\]\]"),
    ],
)
def test_no_other_speeds_are_taken(speeds: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_speeds(speeds, 2)


def two(worker: object, sample: object) -> None:
    """A hook."""


class Recorder:
    """A hook that is an object, with a method that is one as well."""

    def __call__(self, worker: object, sample: object) -> None: ...

    def record(self, worker: object, sample: object) -> None: ...


HOOKS: dict[str, Any] = {
    "none": None,
    "function": two,
    "lambda": lambda worker, sample: None,
    "defaults": lambda worker, sample, extra=1: None,
    "anything": lambda *anything: None,
    "object": Recorder(),
    "method": Recorder().record,
    "partial": functools.partial(lambda log, worker, sample: None, []),
    "builtin": print,
    "without a signature": dict,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_whatever_can_be_called_so_is_a_hook(hook: Any) -> None:
    check_callable("prehook", hook, ("worker", "sample"))


@pytest.mark.parametrize(
    "hook, got",
    [
        ("hook", r"got str 'hook'"),
        (3, r"got int 3"),
        (lambda worker: None, r"got a function of \(worker\) \(.*test_arguments\.py:\d+\)"),
        (lambda worker, sample, third: None, r"got a function of \(worker, sample, third\)"),
        (lambda worker, sample, *, log: None, r"got a function of \(worker, sample, \*, log\)"),
        (functools.partial(two, 1), r"got a function of \(sample"),
    ],
    ids=["string", "number", "too few", "too many", "keyword needed", "partial"],
)
def test_what_cannot_be_called_so_is_no_hook(hook: Any, got: str) -> None:
    with pytest.raises(TypeError, match=r"^`prehook` must be callable as prehook\(worker, sample\); " + got):
        check_callable("prehook", hook, ("worker", "sample"))


def test_precode_is_given_the_worker_alone() -> None:
    check_hooks(precode=lambda worker: None, prehook=two, posthook=None)
    with pytest.raises(TypeError, match=r"`precode` must be callable as precode\(worker\); got a function of"):
        check_hooks(precode=two)
    with pytest.raises(TypeError, match=r"`posthook` must be callable as posthook\(worker, sample\)"):
        check_hooks(posthook=lambda worker: None)


def loss_fn(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of its own."""
    return torch.zeros(())


class LossClass:
    """What makes a loss function, and could be called as one."""

    def __init__(self, module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    "criterion, loss",
    [
        (None, None),
        (torch.nn.MSELoss(), None),
        (torch.nn.functional.mse_loss, None),
        (None, loss_fn),
        (torch.nn.Linear(2, 2).requires_grad_(False), None),
    ],
    ids=["neither", "module", "function", "loss_fn", "frozen"],
)
def test_a_loss_is_a_criterion_or_a_loss_fn(criterion: Any, loss: Any) -> None:
    check_criterion(criterion, loss)


@pytest.mark.parametrize(
    "criterion, loss, error, message",
    [
        (torch.nn.MSELoss(), loss_fn, ValueError, r"`criterion` and `loss_fn` are both given"),
        (torch.nn.MSELoss, None, TypeError, r"got the class MSELoss - did you mean MSELoss\(\)\?"),
        ("mse", None, TypeError, r"`criterion` must be callable as criterion\(output, targets\); got str"),
        (None, "mse", TypeError, r"`loss_fn` must be callable as loss_fn\(module, inputs, targets\); got str 'mse'"),
        (None, LossClass, TypeError, r"`loss_fn` must be a function of .*; got the class LossClass"),
        (None, two, TypeError, r"`loss_fn` must be callable as .*got a function of \(worker"),
        (torch.nn.Linear(2, 2), None, ValueError, r"`criterion` has trainable parameters, which would not be trained"),
    ],
    ids=["both", "class", "string", "loss_fn string", "loss_fn class", "loss_fn arity", "trainable"],
)
def test_no_other_loss_is_taken(criterion: Any, loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_criterion(criterion, loss)


def test_settings_have_the_arguments_of_a_batch_optimizer() -> None:
    """They are read by name."""
    others = {"module", "optimizer", "ray_options", "residual"}  # the last is a `loss_fn`, once it is read
    arguments = set(inspect.signature(BatchOptimizer).parameters) - others
    assert {field.name for field in fields(Settings)} - {"deterministic", "options"} == arguments


@pytest.mark.parametrize(
    "name, here",
    [
        ("n_jobs", "it is parallelize=... here"),
        ("num_workers", "it is parallelize=... here"),
        ("lr", "it is optimizer=lambda params: torch.optim.Adam(params, lr=...), for example here"),
        ("device", "devices=[...], with one for each worker here"),
        ("paralellize", "it is parallelize=... here"),
    ],
)
def test_an_argument_that_there_is_not_is_told_what_it_is_called_here(name: str, here: str) -> None:
    options: Any = {name: 2}
    with pytest.raises(TypeError, match=rf"^BatchOptimizer has no argument `{name}`: .*{re.escape(here)}$"):
        BatchOptimizer(torch.nn.Linear(2, 1), **options)
    options = {"zzz": 1}
    with pytest.raises(TypeError, match=r"^BatchOptimizer has no argument `zzz`$"):
        BatchOptimizer(torch.nn.Linear(2, 1), **options)
