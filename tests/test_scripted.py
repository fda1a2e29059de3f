"""Modules made by torch.jit, whole and in part: they hold buffers and parameters in no dict."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchopt import BatchOptimizer

X = torch.linspace(-1, 1, 36).view(12, 3)
Y = X.sin().sum(1)


Module: Any = nn.Module  # whose attributes may be anything: torch.jit understands none of the annotations it would take


class Scaled(Module):  # type: ignore[misc]
    """A constant, and a counter that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.arange(1.0, 4.0))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return x * self.constant / self.count


def scripted(module: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        return torch.jit.script(module)


def read(data: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


class Sum(nn.Module):
    """Of what another module returns, over its columns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x).sum(1)
        return found


def test_a_module_that_is_scripted_as_a_whole_is_trained_in_this_process() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    whole = scripted(copy.deepcopy(plain))
    with BatchOptimizer(Sum(plain), nn.MSELoss(), optimizer="sgd") as opt:
        expected = [opt.step(X, Y), opt.step(X, Y)]
    with BatchOptimizer(Sum(whole), nn.MSELoss(), optimizer="sgd") as opt:
        assert [opt.step(X, Y), opt.step(X, Y)] == pytest.approx(expected, rel=1e-5)
        assert dict(whole.named_buffers())["1.num_batches_tracked"] == 2
        with pytest.raises(TypeError, match=r"'module' was made by torch\.jit .* or use parallelize=1"):
            opt.resize(2)


class Through(nn.Module):
    """A layer before anything that can be called."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.part = nn.Linear(3, 3), part

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(self.layer(x)).sum(1)
        return found


def saved(part: Any) -> bytes:
    file = io.BytesIO()
    torch.jit.save(part, file)
    return file.getvalue()


def double(x: Tensor) -> Tensor:
    return 2 * x


PARTS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: scripted(Scaled()),
    "copied": lambda: copy.deepcopy(scripted(Scaled())),
    "read": lambda: read(saved(scripted(Scaled()))),
    "frozen": lambda: torch.jit.freeze(scripted(nn.BatchNorm1d(3).eval())),
    "traced": lambda: torch.jit.trace(  # type: ignore[no-untyped-call]
        nn.BatchNorm1d(3).eval().requires_grad_(False), X
    ),
    "a function": lambda: scripted(double),
}


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", PARTS)
def test_parts_that_torch_jit_made_are_sent_to_workers(kind: str) -> None:
    found = []
    for parallelize in (1, 2):
        with BatchOptimizer(Through(PARTS[kind]()), nn.MSELoss(), optimizer="sgd", parallelize=parallelize) as opt:
            found.append([opt.step(X, Y), opt.step(X, Y)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
