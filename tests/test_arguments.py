"""Arguments that are taken, and what is made of them; `test_bad_inputs.py` has those that are refused."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchopt import BatchOptimizer
from batchopt._data.arguments import (
    read,
    read_devices,
    read_parallelize,
    read_speeds,
)
from batchopt._data.batches import BatchSpec, read_part
from batchopt._engine.settings import Settings
from batchopt._machine.cores import usable_cores
from batchopt._mapreduce.speeds import Speeds
from batchopt.backends import backend_class
from batchopt.backends.base import Setup
from batchopt.backends.process.startup import check_room

GIVEN = Speeds((1.0, 2.5, 0.0), fixed=True)


@pytest.mark.parametrize(
    "reader, values",
    [
        (read_parallelize, {1: 1, 17: 17, "auto": usable_cores()}),
        (backend_class("process").read_workers, {3: 3}),
        (backend_class("serial").read_workers, {1: 1}),
        (
            functools.partial(read, "timeout"),
            {value: float(value) for value in (1, 0.5, 1e-9, 10**6, np.float32(2.5), np.int64(3))},
        ),
        (functools.partial(read, "timeout"), {Fraction(1, 4): 0.25, None: None}),
        (functools.partial(read, "max_restarts"), {value: value for value in (None, 0, 1, 100)}),
        (functools.partial(read, "chunk_size"), {None: None, 1: 1}),
        (functools.partial(read, "seed"), {0: 0, 2**63: 2**63}),
        (functools.partial(read, "on_nonfinite"), {"raise": "raise", "return": "return"}),
        (functools.partial(read, "verbose"), {level: level for level in range(4)}),
        (lambda speeds: read_speeds(speeds and list(speeds), 3), {None: None, (1, 2.5, 0): GIVEN}),
        (lambda speeds: read_speeds(speeds, 3), {(np.int64(1), np.float32(2.5), Fraction(0)): GIVEN}),
    ],
)
def test_what_is_given_is_read_as_a_plain_value(reader: Callable[[Any], Any], values: dict[Any, Any]) -> None:
    for value, expected in values.items():
        assert (type(reader(value)), reader(value)) == (type(expected), expected)


def test_a_worker_may_be_replaced_four_times_by_default() -> None:
    assert [Setup.restarts_of(SimpleNamespace(restarts=value), 3) for value in (None, 0, 7)] == [12, 0, 7]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "workers, memory, descriptors, message",
    [
        (10_000, 24e9, 1024, r"2200\.0 GB of memory and 70000 open files; .* has 24\.0 GB, and `ulimit -n` all"),
        (10_000, 24e9, 1024, r"allows 1024 files: use at most 109$"),
        (10_000, 1e15, 1024, r"allows 1024 files: use at most 146$"),
        (200, 1e15, 1024, r"`parallelize` 200 needs about 44\.0 GB of memory and 1400 open files; .*: use at most 146"),
        (200, 24e9, math.inf, r"has 24\.0 GB, and `ulimit -n` allows inf files: use at most 109$"),
        (3, 4.4e8, 1024, r"`parallelize` 3 needs about 0\.7 GB of memory .* has 0\.4 GB, .*: use at most 2$"),
        (2, 1e6, 4, r"use at most 1$"),
    ],
)
def test_more_workers_than_a_machine_has_room_for_are_refused_with_the_numbers(
    workers: int, memory: float, descriptors: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_room(workers, int(memory), descriptors)


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
    with BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss(), prehook=hook, posthook=hook) as opt:
        assert opt.prehook is hook and opt.posthook is hook


def test_settings_have_the_arguments_of_a_batch_optimizer() -> None:
    """They are read by name."""
    others = {"module", "optimizer", "ray_options", "residual"}  # the last is a `loss_fn`, once it is read
    arguments = set(inspect.signature(BatchOptimizer).parameters) - others
    found = {"automatic", "candidates", "deterministic", "options", "sizes_chunks"}  # of an argument and of torch
    found |= {"graph", "nonfinite_errors"}  # of `compile` and `on_nonfinite`
    assert {field.name for field in fields(Settings)} - found == arguments


@pytest.mark.parametrize(("count", "rank", "index"), [(1, 3, 0), (4, 2, 2), (4, 5, 1), (4, None, 0)])
def test_a_device_without_a_number_is_that_of_the_rank(
    count: int, rank: int | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert read_devices(["cuda", "cpu"], 1) == (torch.device("cuda", index), torch.device("cpu"))


def test_parameters_are_where_the_workers_are() -> None:
    """As far as the backend can tell: nothing shared, and not on the cpu."""
    setup: Any = SimpleNamespace(flat=SimpleNamespace(block=None, vector=torch.empty(3, device="meta")))
    with pytest.raises(ValueError, match=r"parameters are on meta; workers run on cpu: call"):
        backend_class("process").check(setup)


X = torch.rand(3)
PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "inputs": lambda t: t,
    "inputs[1]": lambda t: (X, t),
    "inputs['b'][0]": lambda t: {"a": X, "b": [t]},
    "inputs[1]['a']": lambda t: [{"a": X}, {"a": t}, {}],
}


@pytest.mark.parametrize("path", PLACES)
def test_a_batch_is_where_the_workers_are(path: str) -> None:
    spec, wrap = BatchSpec(None, "mean", None, None, torch.device("cpu")), PLACES[path]
    with FakeTensorMode():
        elsewhere = torch.ones(3, 2, device="cuda:1")
    with pytest.raises(ValueError) as caught:
        read_part(wrap(elsewhere), None, None, spec)
    assert (
        str(caught.value) == f"`{path}` is on cuda:1; workers run on cpu: call .to('cpu') on it, or use parallelize=1"
    )
    assert read_part(wrap(elsewhere), None, None, BatchSpec(None, "mean", None, None)).size == 3
