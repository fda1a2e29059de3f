from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt_workers.map.objective import Objective

INPUTS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
TARGETS = torch.tensor([[1.0], [0.0]])


class OwnLoss(nn.Module):
    """A module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight * (inputs.sum() if targets is None else targets.sum())


@pytest.mark.parametrize(("targets", "expected"), [(None, 20.0), (TARGETS, 2.0)])
def test_a_module_alone_is_its_own_loss(targets: torch.Tensor | None, expected: float) -> None:
    output, loss = Objective(OwnLoss(), None, None)(INPUTS, targets)
    assert output is None
    assert loss.item() == expected


def test_the_criterion_has_its_own_weight_back_after_it_raised() -> None:
    whole = torch.rand(5, 1)
    criterion = nn.BCELoss(weight=whole)
    objective = Objective(nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), criterion, None)
    with pytest.raises(ValueError, match="target size"):
        objective(INPUTS, torch.rand(3, 1), {"weight": whole[:2]})
    assert criterion.weight is whole


class SeesWeight(nn.Module):
    """A criterion that notes its weight at each call."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.seen: list[torch.Tensor] = []

    def forward(self, output: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(self.weight)
        return output.sum()


@pytest.mark.parametrize("targets", [None, TARGETS])
def test_without_rows_the_criterion_keeps_its_weight(targets: torch.Tensor | None) -> None:
    whole, rows = torch.rand(5), torch.rand(2)
    criterion = SeesWeight(whole)
    objective = Objective(nn.Linear(2, 1), criterion, None)
    objective(INPUTS, targets)
    objective(INPUTS, targets, {"weight": rows})
    objective(INPUTS, targets)
    assert [id(weight) for weight in criterion.seen] == [id(whole), id(rows), id(whole)]


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.value


SOURCES: dict[str, Callable[[Any], Objective]] = {
    "loss_fn": lambda value: Objective(OwnLoss(), None, lambda *_: value),
    "criterion": lambda value: Objective(nn.Linear(2, 1), lambda *_: value, None),
    "module": lambda value: Objective(Returns(value), None, None),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "value, error, words",
    [
        (1.5, TypeError, ".* got float"),
        (None, TypeError, ".* got NoneType"),
        ((torch.tensor(1.0),), TypeError, ".* got tuple"),
        (torch.zeros(2, requires_grad=True), ValueError, r" must return a scalar; got shape .*\(2,\)"),
        (torch.zeros(0, requires_grad=True), ValueError, r" must return a scalar; got shape .*\(0,\)"),
        (torch.zeros(1, 2, requires_grad=True), ValueError, r" must return a scalar; got shape .*\(1, 2\)"),
        (torch.tensor(1.0), ValueError, " does not depend on any trainable parameter"),
    ],
)
def test_what_is_no_loss_is_named_with_its_source(source: str, value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"`{source}`{words}"):
        SOURCES[source](value)(INPUTS, None)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_any_shape_of_one_element_is_a_scalar(shape: tuple[int, ...]) -> None:
    _, loss = SOURCES["loss_fn"](torch.ones(shape, requires_grad=True))(INPUTS, None)
    assert loss.shape == shape
