"""What ranks compare of their programs: equal for equal programs in any process, other for programs of another f."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchopt._program.description import ComparedProgram, describe, digest
from batchopt_workers.map.program import Program


class Scaled:
    """A criterion of the user's own."""

    def __init__(self, scale: float) -> None:
        self.scale, self.lock_free = scale, True

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.scale * (output - targets).square().mean()


def program() -> dict[str, Any]:
    """A module with attributes of many kinds, and losses."""
    module: Any = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.utils.spectral_norm(nn.Linear(3, 1)))
    module.sizes, module.names = {"a": 1, "b": [2.0, None]}, {"x", "y", "z", "long name", "another"}
    module.grid, module.device = np.linspace(0, 1, 5), torch.device("cpu")
    module.where, module.parent = "cuda:1", [module]
    module.lock, module.draws = threading.Lock(), np.random.default_rng()
    weight = torch.randn(3)

    def loss_fn(net: Any, x: Any, y: Any, power: int = 2) -> Any:
        return (weight * net(x) - y).pow(power).mean() if "x" in {"x", "w", "v"} else None

    return {"module": module, "criterion": Scaled(2.0), "loss_fn": functools.partial(loss_fn, power=3)}


@pytest.mark.slow
def test_equal_programs_have_equal_descriptions_in_other_processes() -> None:
    code = "from tests.test_description import *; print(digest(describe(program())))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1",)
    }
    assert found == {digest(describe(program()))}


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "module.1.training": lambda p: p["module"][1].eval(),
    "module.1.p": lambda p: setattr(p["module"][1], "p", 0.25),
    "module.0.bias.requires_grad": lambda p: p["module"][0].bias.requires_grad_(False),
    "module.sizes['b'][0]": lambda p: p["module"].sizes["b"].__setitem__(0, 3.0),
    "module.names": lambda p: p["module"].names.add("w"),
    "module.grid": lambda p: p["module"].grid.__setitem__(0, 1.0),
    "module.2": lambda p: p["module"].__setitem__(2, nn.Tanh()),
    "criterion.scale": lambda p: setattr(p["criterion"], "scale", 3.0),
    "criterion": lambda p: p.update(criterion=nn.MSELoss()),
    "loss_fn.keywords['power']": lambda p: p["loss_fn"].keywords.update(power=2),
    "loss_fn": lambda p: p.update(loss_fn=lambda net, x, y: net(x).mean()),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_difference_is_named_by_its_path(path: str) -> None:
    one, other = program(), program()
    CHANGES[path](other)
    first, second = describe(one), describe(other)
    assert path in {name for name, _ in {*first.items()} ^ {*second.items()}}
    assert digest(first) != digest(second)


def test_an_object_that_raises_is_described_by_its_type() -> None:
    class Odd:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise ZeroDivisionError

    assert [*describe({"criterion": Odd()}).values()] == [f"{__name__}.{Odd.__qualname__}"]


def test_what_forwards_write_is_left_out_with_the_container_and_modes_never_are() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    module.cache, module.calls = {}, 0
    one = ComparedProgram(Program(module, nn.MSELoss(), (None,), 0))
    module.cache[7], module.calls = 1, 1
    one.learn()
    learned = one.digest
    module.cache[8], module.calls = 2, 2
    one.resync()
    assert one.digest == learned
    module.eval()
    one.learn()
    assert one.digest != learned
    parts, written = one.in_full
    assert "module.calls" in written and "module.cache" in written
    assert one.differing([(parts, written), ({**parts, "module.1.p": "0.25", "module.calls": "5"}, set())]) == [
        {"module.1.p": "0.5"},
        {"module.1.p": "0.25"},
    ]
