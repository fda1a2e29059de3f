"""Every loss of torch.nn, and random modules with random changes: compiled evaluations are the eager ones, or eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from batchopt import BatchOptimizer
from tests.test_losses import CASES, inputs, made, module_of

WITH_STATE = ("CTCLoss", "LinearCrossEntropyLoss")  # of sequences; with parameters
X = torch.linspace(-2.0, 2.0, 12 * 4, dtype=torch.float64).reshape(12, 4).sin()


def assert_compiled_is_eager(module: nn.Module, loss: Any, x: torch.Tensor, y: Any, **options: Any) -> None:
    options = {"loss_fn": loss, "optimizer": None, "check_cut": False, "on_nonfinite": "return", **options}
    found = []
    for how in (False, "auto"):
        with BatchOptimizer(module, **options, compile=how) as opt:
            opt.load(x, y)
            opt.evaluate()
            compilation = opt._engine.policies.compilation
            if compilation is not None and compilation._compiler is not None:
                compilation._compiler.reply(waits=True)
                opt.evaluate()
            found.append((opt.evaluate().item(), opt.grad_parameters.clone()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10, nan_ok=True)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-8, atol=1e-10, equal_nan=True)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name, which", [case for case in CASES if case.values[0] not in WITH_STATE])
def test_each_loss_of_torch(name: str, which: int) -> None:
    torch.manual_seed(which)
    case, module = made(name)[which]("mean"), module_of(name)
    loss = case.loss_fn or (lambda m, x, y: case.criterion(m(x), y))
    assert_compiled_is_eager(module, loss, inputs(), case.targets)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "eval": lambda module: module.eval(),
    "train": lambda module: module.train(),
    "factor": lambda module: setattr(module, "factor", 2.0),
    "freeze": lambda module: next(module.parameters()).requires_grad_(False),
    "fewer": lambda module: None,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "softplus": nn.Softplus,
    "dropout": lambda: nn.Dropout(0.3),
    "layer norm": lambda: nn.LayerNorm(4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "linear": lambda: nn.Linear(4, 4),
    "silu": nn.SiLU,
    "prelu": nn.PReLU,
    "weights that are normalised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten()),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*statistics of a chunk")
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=3),
    slopes=st.booleans(),
    parallelize=st.sampled_from([1, 2]),
    changes=st.lists(st.sampled_from([*CHANGES]), max_size=2),
)
def test_random_modules_with_random_changes(
    names: list[str], slopes: bool, parallelize: int, changes: list[str]
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), *(LAYERS[name]() for name in names), nn.Linear(4, 1)).double()
    module.factor = 1.0  # type: ignore[assignment]

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.requires_grad_(slopes)
        u = m(x)
        found: torch.Tensor = (m.factor * u - y).square().mean()
        if slopes:
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            found = found + slope.square().mean()
        return found

    x, y, options = X, X[:, :1].cos(), {"parallelize": parallelize, "chunk_size": 6}
    assert_compiled_is_eager(module, loss, x, y, **options)
    for change in changes:
        CHANGES[change](module)
        if change == "fewer":
            x, y = x[:7], y[:7]
        assert_compiled_is_eager(module, loss, x, y, **options)
