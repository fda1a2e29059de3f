"""Parameters as one vector, wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, hogwild
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
        BatchOptimizer(module, nn.MSELoss()).close()
    vector = Vector(numbered(list(module.parameters())))
    found = vector.empty()
    vector.read(found)
    assert found.tolist() == list(range(27))
    vector.write(-found)
    assert torch.cat([p.detach().flatten() for p in module.parameters()]).tolist() == (-found).tolist()


@pytest.mark.parametrize("way", ["assign", "hogwild"])
def test_a_graph_from_before_cannot_be_differentiated_once_parameters_are_written(way: str) -> None:
    """As after a step, of which `test_contract.py` says so."""
    module, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.ones(12, 3), torch.ones(12, 1)
    with BatchOptimizer(module, nn.MSELoss(), parallelize=2) as opt:
        before = module(x).sum()
        if way == "assign":
            opt.objective().assign(opt.parameters.numpy() + 1)
        else:
            hogwild(opt, (x, y), lambda params: torch.optim.SGD(params, lr=0.1), batch_size=6)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
