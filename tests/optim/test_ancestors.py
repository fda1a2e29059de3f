"""The options of Torch7's SGD and ASGD, as torch's optimizers have them; docs/optimizers.md says how."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import batchopt

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
Y = X.sum(1, keepdim=True).sin()


def model() -> torch.nn.Linear:
    linear = torch.nn.Linear(2, 1).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.5, -1.0]]))
        linear.bias.fill_(0.1)
    return linear


def gradient(w: torch.Tensor) -> torch.Tensor:
    """Of the mean square, by the two weights and the bias."""
    ones = torch.cat((X, torch.ones(12, 1, dtype=torch.float64)), 1)
    return 2 / 12 * ones.T @ (ones @ w - Y[:, 0])


def vector(linear: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in linear.parameters()])


def test_momentum_that_dampens_the_gradient() -> None:
    """g = (1 - m) g + m g_before, the first g as it is."""
    linear, w, before = model(), vector(model()), None
    with batchopt.BatchOptimizer(
        linear, torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9)
    ) as opt:
        for _ in range(5):
            g = gradient(w)
            before = g if before is None else 0.1 * g + 0.9 * before
            w = w - 0.1 * before
            opt.step(X, Y)
            torch.testing.assert_close(vector(linear), w)


def test_weight_decay_that_is_not_times_the_learning_rate() -> None:
    """w = w - decay w - lr g: torch's weight_decay is decay / lr."""
    linear, w = model(), vector(model())
    with batchopt.BatchOptimizer(
        linear, torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02 / 0.1)
    ) as opt:
        for _ in range(4):
            w = w - 0.02 * w - 0.1 * gradient(w)
            opt.step(X, Y)
        torch.testing.assert_close(vector(linear), w)


def test_learning_rate_that_decays_by_the_sample() -> None:
    """lr / (1 + samples * decay), by a scheduler that looks at the counter."""
    linear, w, samples = model(), vector(model()), 0
    with batchopt.BatchOptimizer(linear, torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as opt:
        assert opt.optimizer is not None
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt.optimizer, lambda _: 1 / (1 + opt.sample_counter * 0.05))
        for _ in range(4):
            w = w - 0.1 / (1 + samples * 0.05) * gradient(w)
            samples += 12
            opt.step(X, Y)
            scheduler.step()
        torch.testing.assert_close(vector(linear), w)


def test_learning_rates_of_their_own() -> None:
    linear, w = model(), vector(model())

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias = params
        groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1)

    with batchopt.BatchOptimizer(linear, torch.nn.MSELoss(), optimizer=make) as opt:
        for _ in range(3):
            w = w - torch.tensor([0.1, 0.1, 0.01]) * gradient(w)
            opt.step(X, Y)
    torch.testing.assert_close(vector(linear), w)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_averaged_parameters_to_evaluate_with(parallelize: int) -> None:
    linear = model()
    points = []
    with batchopt.BatchOptimizer(
        linear, torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), parallelize=parallelize
    ) as opt:
        averaged = torch.optim.swa_utils.AveragedModel(linear)
        for _ in range(4):
            opt.step(X, Y)
            averaged.update_parameters(linear)
            points.append(vector(linear))
    mean = torch.stack(points).mean(0)
    torch.testing.assert_close(vector(averaged.module), mean)
    torch.testing.assert_close(vector(linear), points[-1])


def test_averaged_sgd_by_name() -> None:
    with batchopt.BatchOptimizer(model(), torch.nn.MSELoss(), optimizer="asgd") as opt:
        first = opt.step(X, Y)
        for _ in range(20):
            last = opt.step(X, Y)
    assert isinstance(opt.optimizer, torch.optim.ASGD) and last < first
