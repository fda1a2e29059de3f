"""What the caller is in, or has set, when it asks for an evaluation is in force in the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from tests.building import loaded

WORKERS = pytest.mark.parametrize("parallelize", [1, 2])
DATA = torch.linspace(-1, 1, 24).view(8, 3), torch.linspace(0, 1, 8).view(8, 1)


class Probing(nn.Module):
    """Its output depends on what is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        made = torch.zeros(1)
        tiny = torch.tensor([1e-310], dtype=torch.float64, device="cpu") / 2
        facts = [
            y.dtype == torch.bfloat16,
            made.dtype == torch.float64,
            made.is_meta,
            not tiny.item(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision() == "medium",
            torch.is_anomaly_enabled(),
            not torch.backends.mkldnn.enabled,
        ]
        found: torch.Tensor = y + sum(2.0**i for i, fact in enumerate(facts) if fact)
        return found


@contextmanager
def _set(to: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    to(value)
    try:
        yield
    finally:
        to(before)


AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: torch.device("meta"),
    "flush denormal": lambda: _set(torch.set_flush_denormal, True, False),
    "matmul precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "mkldnn": lambda: _set(torch._C._set_mkldnn_enabled, False, True),
}


@WORKERS
def test_settings_are_those_of_the_moment_of_an_evaluation(parallelize: int) -> None:
    torch.manual_seed(0)
    module = Probing()
    with loaded(module, nn.MSELoss(), *DATA, parallelize=parallelize) as opt:
        for name, enter in [("nothing", nullcontext), *AMBIENT.items(), ("nothing again", nullcontext)]:
            with enter():
                expected = nn.functional.mse_loss(module(DATA[0]), DATA[1]).item()
                assert opt.evaluate().item() == pytest.approx(expected, rel=1e-2 if name == "autocast" else 1e-6), name


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatch(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.rows
@pytest.mark.parametrize(
    ("enter", "name"),
    [
        pytest.param(
            lambda: torch.autograd.graph.save_on_cpu(),
            "saved_tensors_hooks",
            marks=pytest.mark.skipif(
                not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="this torch does not tell"
            ),
        ),
        (_Function, r"_Function \(a TorchFunctionMode\)"),
        (_Dispatch, r"_Dispatch \(a TorchDispatchMode\)"),
    ],
    ids=["saved tensors", "function mode", "dispatch mode"],
)
def test_what_cannot_be_carried_is_refused_by_name(enter: Callable[[], Any], name: str) -> None:
    with loaded(nn.Linear(3, 1), nn.MSELoss(), *DATA, parallelize=2) as opt:
        before = opt.evaluate()
        with enter(), pytest.raises(ValueError, match=f"{name} is active and cannot be transferred to workers"):
            opt.evaluate()
        assert torch.isclose(opt.evaluate(), before)
    with loaded(nn.Linear(3, 1), nn.MSELoss(), *DATA) as opt:
        with enter():
            opt.evaluate()
