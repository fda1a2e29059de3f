"""Arguments that are taken, and what is made of them; `test_bad_inputs.py` has those that are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchopt import BatchOptimizer


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


X = torch.rand(3)
PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "inputs": lambda t: t,
    "inputs[1]": lambda t: (X, t),
    "inputs['b'][0]": lambda t: {"a": X, "b": [t]},
    "inputs[1]['a']": lambda t: [{"a": X}, {"a": t}, {}],
}


def test_a_batch_is_where_the_workers_are() -> None:
    with FakeTensorMode():
        elsewhere = torch.ones(3, 2, device="cuda:1")
    with BatchOptimizer(torch.nn.Linear(2, 1), torch.nn.MSELoss(), parallelize=2) as opt:
        for path, wrap in PLACES.items():
            with pytest.raises(ValueError) as caught:
                opt.load(wrap(elsewhere))
            words = f"`{path}` is on cuda:1; workers run on cpu: call .to('cpu') on it, or use parallelize=1"
            assert str(caught.value) == words


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": np.float32(2.5), "seed": 2**63, "max_restarts": 0, "speeds": (np.int64(1),)},
        {"timeout": Fraction(1, 4), "speeds": [Fraction(2)]},
    ],
)
def test_numbers_of_other_kinds_are_taken(options: dict[str, Any]) -> None:
    with BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss(), **options) as opt:
        assert opt.step(torch.ones(3, 1), torch.ones(3, 1)) >= 0
