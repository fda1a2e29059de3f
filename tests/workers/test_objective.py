from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt_workers.objective import Objective

INPUTS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
TARGETS = torch.tensor([[1.0], [0.0]])


class OwnLoss(nn.Module):
    """A module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight * (inputs.sum() if targets is None else targets.sum())


def test_a_criterion_is_given_the_output_and_the_targets() -> None:
    module = nn.Linear(2, 1)
    output, loss = Objective(module, nn.MSELoss(), None)(INPUTS, TARGETS)
    assert torch.equal(output, module(INPUTS))
    assert torch.equal(loss, nn.functional.mse_loss(module(INPUTS), TARGETS))


def test_without_targets_a_criterion_is_given_the_output_alone() -> None:
    module = nn.Linear(2, 1)
    output, loss = Objective(module, torch.sum, None)(INPUTS, None)
    assert torch.equal(output, module(INPUTS))
    assert torch.equal(loss, module(INPUTS).sum())


@pytest.mark.parametrize("targets", [None, TARGETS])
def test_a_loss_function_is_given_the_module_the_inputs_and_the_targets(targets: torch.Tensor | None) -> None:
    module = OwnLoss()
    seen: list[Any] = []

    def loss_fn(*arguments: Any) -> torch.Tensor:
        seen.extend(arguments)
        return module.weight * 3

    output, loss = Objective(module, None, loss_fn)(INPUTS, targets)
    assert [id(argument) for argument in seen] == [id(module), id(INPUTS), id(targets)]
    assert output is None
    assert loss.item() == 6.0


@pytest.mark.parametrize(("targets", "expected"), [(None, 20.0), (TARGETS, 2.0)])
def test_a_module_alone_is_its_own_loss(targets: torch.Tensor | None, expected: float) -> None:
    output, loss = Objective(OwnLoss(), None, None)(INPUTS, targets)
    assert output is None
    assert loss.item() == expected


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_any_shape_of_one_element_is_a_scalar(shape: tuple[int, ...]) -> None:
    module = OwnLoss()
    _, loss = Objective(module, None, lambda *_: module.weight.expand(shape))(INPUTS, None)
    assert loss.shape == shape


def as_loss_fn(value: Any) -> Objective:
    return Objective(OwnLoss(), None, lambda *_: value)


def as_criterion(value: Any) -> Objective:
    return Objective(nn.Linear(2, 1), lambda *_: value, None)


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.value


def as_module(value: Any) -> Objective:
    return Objective(Returns(value), None, None)


SOURCES = pytest.mark.parametrize(
    ("source", "returning"), [("loss_fn", as_loss_fn), ("criterion", as_criterion), ("module", as_module)]
)


@SOURCES
@pytest.mark.parametrize("value", [1.5, None, (torch.tensor(1.0),)])
def test_a_loss_that_is_no_tensor_names_its_source_and_its_type(
    source: str, returning: Callable[[Any], Objective], value: Any
) -> None:
    with pytest.raises(TypeError, match=f"`{source}`.* got {type(value).__name__}"):
        returning(value)(INPUTS, None)


@SOURCES
@pytest.mark.parametrize("shape", [(2,), (0,), (1, 2)])
def test_a_loss_that_is_no_scalar_names_its_source_and_its_shape(
    source: str, returning: Callable[[Any], Objective], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=f"`{source}` must return a scalar; got shape") as caught:
        returning(torch.zeros(shape, requires_grad=True))(INPUTS, None)
    assert str(shape) in str(caught.value)


@SOURCES
def test_a_loss_without_a_graph_names_its_source(source: str, returning: Callable[[Any], Objective]) -> None:
    with pytest.raises(ValueError, match=f"`{source}` does not depend on any trainable parameter"):
        returning(torch.tensor(1.0))(INPUTS, None)
