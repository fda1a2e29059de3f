"""Parameters as one vector, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt._program.flatten import flatten
from batchopt.optim.vector import Vector


def numbered(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same, with the numbers from 0 on as elements."""
    start = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
            start += parameter.numel()
    return parameters


@pytest.mark.parametrize("flat", [True, False], ids=["in one vector", "apart"])
def test_parameters_are_read_and_written(flat: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ParameterList([torch.zeros(0, 2), torch.zeros(())]), nn.Linear(4, 2))
    if flat:
        flatten(module)
    vector = Vector(numbered(list(module.parameters())))
    found = vector.empty()
    vector.read(found)
    assert found.tolist() == list(range(27))
    vector.write(-found)
    assert torch.cat([p.detach().flatten() for p in module.parameters()]).tolist() == (-found).tolist()


X, Y = torch.linspace(-1, 1, 36).view(12, 3), torch.linspace(-1, 1, 12)[:, None]
WAYS: dict[str, Callable[[BatchOptimizer], object]] = {
    "step": lambda opt: opt.step(X, Y),
    "assign": lambda opt: opt.objective().assign(opt.parameters.numpy() + 1),
    "hogwild": lambda opt: opt.hogwild((X, Y), lambda params: torch.optim.SGD(params, lr=0.1), batch_size=6),
}


@pytest.mark.sampled
@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize(
    ("name", "way"),
    [*((n, "step") for n in ("lbfgs", "cg", "ssbroyden", "lm", "sgd")), ("cg", "assign"), ("cg", "hogwild")],
)
def test_a_graph_from_before_cannot_be_differentiated_once_parameters_are_written(
    name: str, way: str, parallelize: int
) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with BatchOptimizer(module, nn.MSELoss(), optimizer=name, parallelize=parallelize) as opt:
        before = module(X).sum()
        WAYS[way](opt)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
