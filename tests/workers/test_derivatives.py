"""Derivatives of a piece are those of plain autograd, and leave parameters and inputs as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchopt_workers.data.batch import Piece
from batchopt_workers.map.derivatives import AtPoints, HessianProducts, InputGradients
from batchopt_workers.process.messages import Cut
from batchopt_workers.tasks.task import Surroundings
from batchopt_workers.worker import Worker
from tests.workloads import Mlp, no_residuals

X = torch.linspace(-1.0, 2.0, 30, dtype=torch.float64).view(5, 6).sin()
CUT = Cut((0, 5))


def surroundings(module: nn.Module, piece: Piece, weight: float = 1.0) -> Surroundings:
    def loss() -> torch.Tensor:
        inputs = piece.inputs["x"] if isinstance(piece.inputs, dict) else piece.inputs
        found: torch.Tensor = module(inputs).square().sum()
        return found

    def evaluate(cut: Cut, gradient: bool) -> tuple[tuple[float, ...], torch.Tensor]:
        return (loss().item(),), torch.cat([p.detach().flatten() for p in module.parameters()])

    worker = Worker(0, 1, torch.device("cpu"), module)
    return Surroundings(worker, module, list(module.parameters()), loss, no_residuals, weight, evaluate)


def test_gradients_with_respect_to_inputs_keep_their_structure() -> None:
    module = Mlp().double()
    given = {"x": X, "index": torch.arange(5), "unused": torch.ones(5)}
    piece = Piece(given, None, None, range(5), 1.0)
    found = InputGradients()(piece, surroundings(module, piece, 0.5))
    assert piece.inputs is given and not X.requires_grad and all(p.grad is None for p in module.parameters())
    inputs = X.clone().requires_grad_()
    (0.5 * module(inputs).square().sum()).backward()
    torch.testing.assert_close(found["x"], inputs.grad)
    assert found["index"] is None and not found["unused"].any()
    whole = Piece(torch.arange(5), None, None, range(5), 1.0)
    with pytest.raises(TypeError, match="nothing to differentiate by"):
        InputGradients()(whole, surroundings(module, whole))
    assert not whole.inputs.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
def test_products_with_several_directions(frozen: bool) -> None:
    module = Mlp().double()
    module.second.requires_grad_(not frozen)
    piece = Piece(X, None, None, range(5), 1.0)
    around = surroundings(module, piece, 2.0)
    size = sum(p.numel() for p in module.parameters())
    directions = torch.linspace(-1, 1, 2 * size, dtype=torch.float64).view(2, size)
    module.first.weight.grad = torch.ones_like(module.first.weight)
    found = HessianProducts(directions)(piece, around)
    assert module.first.weight.grad.eq(1).all() and module.first.bias.grad is None
    trained = [p for p in module.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    gradients = torch.autograd.grad(around.loss(), trained, create_graph=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for direction, product in zip(directions, found, strict=True):
        expected = torch.autograd.grad(2.0 * flat @ direction[:count], trained, retain_graph=True)
        torch.testing.assert_close(product[:count], torch.cat([part.flatten() for part in expected]))
        assert not product[count:].any()
    assert not HessianProducts(directions)(piece, surroundings(module, piece, 0.0)).any()


def test_parameters_are_back_in_their_memory_after_points_whatever_happens() -> None:
    module = Mlp().double()
    memory = [p.data_ptr() for p in module.parameters()]
    points = torch.zeros(3, sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    points[1] = 1.0
    piece = Piece(points, None, None, range(3), 1.0)
    of_x = Piece(X, None, None, range(5), 1.0)
    around = surroundings(module, of_x)
    found = AtPoints(CUT, True)(piece, around)
    assert torch.equal(found["gradients"], points) and found["losses"][0] == 0 != found["losses"][1]
    assert list(AtPoints(CUT, False)(piece, around)) == ["losses"]
    assert [p.data_ptr() for p in module.parameters()] == memory

    def fails(cut: Cut, gradient: bool) -> tuple[tuple[float, ...], torch.Tensor]:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        AtPoints(CUT, True)(piece, around._replace(evaluate=fails))
    assert [p.data_ptr() for p in module.parameters()] == memory
