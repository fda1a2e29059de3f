"""Parameters as one vector, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt._program.flatten import flatten
from batchopt.optim.vector import Vector, _whole


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


def test_parameters_of_one_x_are_one_row() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ParameterList([torch.zeros(0, 2), torch.zeros(())]), nn.Linear(4, 2))
    flat, parameters = flatten(module)
    whole = _whole([p.detach() for p in parameters])
    assert whole is not None
    assert whole.data_ptr() == flat.vector.data_ptr()
    assert whole.shape == flat.vector.shape
    assert _whole([p.detach() for p in reversed(parameters)]) is None
    assert _whole([p.detach() for p in (parameters[0], parameters[-1])]) is None


def test_complex_and_real_parameters_of_one_x_are_one_row() -> None:
    module = nn.ParameterList([torch.zeros(3), torch.tensor([[1 + 2j]])])
    flat, parameters = flatten(module)
    whole = _whole([p.detach() for p in parameters])
    assert whole is not None
    assert whole.tolist() == flat.vector.tolist() == [1, 2, 0, 0, 0]
    assert whole.data_ptr() == flat.vector.data_ptr()


def test_what_lies_otherwise_is_no_row() -> None:
    base = torch.arange(12.0)
    assert _whole([base[:6].view(2, 3).t(), base[6:]]) is None
    assert _whole([base[:6], base[6:].view(torch.int32)]) is None
    assert _whole([torch.view_as_complex(base.view(6, 2)).conj()]) is None
    assert _whole([torch.empty(0)]) is None


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
