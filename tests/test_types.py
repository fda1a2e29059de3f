"""What a type checker knows of results and takes as arguments: `scripts/lint` checks this file, and it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from typing_extensions import assert_type

import batchopt
from batchopt import hogwild
from batchopt._engine.choose import OptimizerChoice

X, Y = torch.linspace(-1, 1, 12)[:, None], torch.ones(12, 1)


def errors(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(inputs) - targets
    return found


def both(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs, -outputs


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).mean()


def test_results_have_the_types_that_a_checker_is_told() -> None:
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss()) as opt:
        opt.load(X, Y)
        points = opt.parameters.repeat(3, 1)
        f = opt.evaluate_many(points)
        assert_type(f, torch.Tensor)
        pair = opt.evaluate_many(points, gradients=True)
        assert_type(pair, tuple[torch.Tensor, torch.Tensor])
        residuals = opt.residuals(X, Y)
        assert_type(residuals, torch.Tensor)
        collected, total = opt.collect(errors, X, Y), opt.total(errors, X, Y, train=False)
        assert_type(collected, torch.Tensor)
        assert_type(total, torch.Tensor)
        predicted = opt.predict(X, transform=both)
        assert_type(predicted, tuple[torch.Tensor, torch.Tensor])
        scores = opt.score((X, Y), {"mean": mean})
        assert_type(scores, dict[str, Any])
        single: float = opt.score((X, Y), mean)
    assert [type(found) for found in (f, residuals, collected, total)] == [torch.Tensor] * 4
    assert [type(found) for found in (pair, predicted)] == [tuple, tuple]
    assert scores == {"mean": single}


def of_any(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def of_tensors(params: Sequence[torch.Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def of_parameters(params: list[torch.nn.Parameter]) -> batchopt.LBFGS:
    return batchopt.LBFGS(params)


CHOICES: list[OptimizerChoice] = [
    torch.optim.LBFGS,
    batchopt.LBFGS,
    partial(torch.optim.LBFGS, max_iter=5),
    partial(batchopt.LBFGS, max_iter=5),
    lambda params: batchopt.CG(params, max_iter=5),
    of_any,
    of_tensors,
    of_parameters,
]


def factories(opt: batchopt.BatchOptimizer) -> None:
    """What a type checker lets hogwild take; it is not called."""
    for factory in (torch.optim.SGD, partial(torch.optim.SGD, lr=0.1)):
        hogwild(opt, (X, Y), factory, batch_size=1)
    hogwild(opt, (X, Y), of_any, batch_size=1)
    hogwild(opt, (X, Y), of_tensors, batch_size=1)
    hogwild(opt, (X, Y), of_parameters, batch_size=1)


@pytest.mark.parametrize("choice", CHOICES, ids=range(len(CHOICES)))
def test_an_optimizer_is_anything_that_makes_one_of_parameters(choice: OptimizerChoice) -> None:
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1), torch.nn.MSELoss(), optimizer=choice) as opt:
        assert opt.step(X, Y) == opt.output


def test_completion_offers_public_names() -> None:
    with batchopt.BatchOptimizer(torch.nn.Linear(1, 1)) as opt:
        assert [name for name in dir(opt) if name.startswith("_") and not name.startswith("__")] == []
        assert {"step", "parameters", "evaluate", "__class__"} <= {*dir(opt)}
