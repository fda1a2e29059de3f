"""The options of Torch7's SGD and ASGD, as torch's optimizers have them; docs/optimizers.md says how."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import batchopt
from batchopt import BatchOptimizer

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


def stepping(make: Any, parallelize: int = 1) -> Iterator[tuple[BatchOptimizer, torch.Tensor]]:
    """The optimizer after each of five steps, and the parameters that it leaves."""
    linear = model()
    with BatchOptimizer(linear, torch.nn.MSELoss(), optimizer=make, parallelize=parallelize) as opt:
        for _ in range(5):
            opt.step(X, Y)
            yield opt, vector(linear)


def test_momentum_that_dampens_the_gradient() -> None:
    """g = (1 - m) g + m g_before, the first g as it is."""
    w, before = vector(model()), None
    for _, found in stepping(partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.9)):
        g = gradient(w)
        before = g if before is None else 0.1 * g + 0.9 * before
        w = w - 0.1 * before
        torch.testing.assert_close(found, w)


def test_weight_decay_that_is_not_times_the_learning_rate() -> None:
    """w = w - decay w - lr g: torch's weight_decay is decay / lr."""
    w = vector(model())
    for _, found in stepping(partial(torch.optim.SGD, lr=0.1, weight_decay=0.02 / 0.1)):
        w = w - 0.02 * w - 0.1 * gradient(w)
        torch.testing.assert_close(found, w)


def test_learning_rate_that_decays_by_the_sample() -> None:
    """lr / (1 + samples * decay), by a scheduler that looks at the counter."""
    w, scheduler = vector(model()), None
    for steps, (opt, found) in enumerate(stepping(partial(torch.optim.SGD, lr=0.1))):
        w = w - 0.1 / (1 + 12 * steps * 0.05) * gradient(w)
        torch.testing.assert_close(found, w)
        if scheduler is None:
            lambda_of: Any = lambda _, opt=opt: 1 / (1 + opt.sample_counter * 0.05)  # noqa: E731
            scheduler = torch.optim.lr_scheduler.LambdaLR(opt.optimizer, lambda_of)  # type: ignore[arg-type]
        else:
            scheduler.step()


def test_learning_rates_of_their_own() -> None:
    w = vector(model())
    for _, found in stepping(lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.01}], lr=0.1)):
        w = w - torch.tensor([0.1, 0.1, 0.01]) * gradient(w)
        torch.testing.assert_close(found, w)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_averaged_parameters_to_evaluate_with(parallelize: int) -> None:
    averaged, points = None, []
    for opt, found in stepping(partial(torch.optim.SGD, lr=0.1), parallelize):
        averaged = averaged or torch.optim.swa_utils.AveragedModel(opt.module)
        averaged.update_parameters(opt.module)
        points.append(found)
    assert averaged is not None
    torch.testing.assert_close(vector(averaged.module), torch.stack(points).mean(0))


def test_averaged_sgd_by_name() -> None:
    with batchopt.BatchOptimizer(model(), torch.nn.MSELoss(), optimizer="asgd") as opt:
        first = opt.step(X, Y)
        for _ in range(20):
            last = opt.step(X, Y)
    assert isinstance(opt.optimizer, torch.optim.ASGD) and last < first
