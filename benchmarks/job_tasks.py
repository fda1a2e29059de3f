"""What whole jobs minimise: a physics-informed network, a least-squares fit and a large regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.pinn_problems import BURGERS


@dataclass
class Task:
    """f is `loss(module, inputs, targets)` over the whole batch."""

    module: nn.Module
    loss: Callable[[Any, Any, Any], Tensor]
    inputs: Tensor
    targets: Tensor

    def f(self) -> float:
        """At the module's parameters."""
        with torch.enable_grad():  # whose derivatives f may have
            return self.loss(self.module, self.inputs, self.targets).item()


def burgers_loss(module: nn.Module, points: Tensor, targets: Tensor) -> Tensor:
    """The mean square of what points leave: of the equation, where `targets` is NaN, else of a known value. The 700 of
    these weigh as much as the 3,000 of the equation."""
    inside = targets.isnan()
    residual = BURGERS.parts["residual"].residual(module, points[inside], None)
    known = module(points[~inside])[:, 0] - targets[~inside]
    found: Tensor = (residual.square().sum() + (3000 / 700) * known.square().sum()) / len(points)
    return found


def burgers() -> Task:
    """Three layers of 20, 3,000 points of the equation and 700 at the edges, evenly mixed."""
    parts = BURGERS.parts
    inside = parts["residual"].draw(3000, 0)
    edges = [parts["initial"].draw(500, 1), parts["boundary"].draw(200, 2)]
    points = torch.cat((inside, *(at for at, _ in edges)))
    targets = torch.cat((torch.full((3000,), math.nan, dtype=torch.float64), *(value for _, value in edges)))
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    return Task(BURGERS.network(0), burgers_loss, points[order], targets[order])


class Regression:
    """The mean cross-entropy, and the squares of the weights as scikit-learn weighs them: C = 1."""

    def __init__(self, samples: int) -> None:
        self.factor = 0.5 / samples

    def __call__(self, module: nn.Linear, inputs: Tensor, targets: Tensor) -> Tensor:
        penalty: Tensor = self.factor * module.weight.square().sum()
        return nn.functional.cross_entropy(module(inputs), targets) + penalty


def regression() -> Task:
    """100,000 samples of 50 features, 510 parameters; labels that a random model with noise gives."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((100_000, 50))
    scores = inputs @ generator.standard_normal((50, 10)) + 3 * generator.gumbel(size=(100_000, 10))
    module = nn.Linear(50, 10, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return Task(module, Regression(len(inputs)), torch.from_numpy(inputs), torch.from_numpy(scores.argmax(1)))


class Poses(nn.Module):
    """A rotation vector and a shift for each scan, shape `(scans, 6)`."""

    def __init__(self, scans: int) -> None:
        super().__init__()
        self.poses = nn.Parameter(torch.zeros(scans, 6, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Where points are, shape `(samples, 3)`; of the inputs the first column is the scan. By Rodrigues' formula."""
        pose, points = self.poses[inputs[:, 0].long()], inputs[:, 1:]
        angle = (pose[:, :3].square().sum(1, keepdim=True) + 1e-24).sqrt()
        axis = pose[:, :3] / angle
        along, across = (axis * points).sum(1, keepdim=True), torch.linalg.cross(axis, points)
        turned = points * angle.cos() + across * angle.sin() + axis * along * (1 - angle.cos())
        found: Tensor = turned + pose[:, 3:]
        return found


def square_error(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square."""
    return nn.functional.mse_loss(module(inputs), targets)


def scans() -> Task:
    """20 scans of 100 points, turned by up to two radians, with noise of 0.01: 120 parameters, 6,000 residuals (of
    which PyPose makes a square matrix)."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(20, 100, 3, generator=generator, dtype=torch.float64)
    inputs = torch.cat((torch.arange(20.0).repeat_interleave(100)[:, None].double(), points.view(-1, 3)), 1)
    true = Poses(20)
    with torch.no_grad():
        turns = torch.randn(20, 6, generator=generator, dtype=torch.float64)
        true.poses.copy_(turns / turns[:, :3].norm(dim=1, keepdim=True) * torch.linspace(0.5, 2.0, 20)[:, None])
        targets = true(inputs)
    targets += 0.01 * torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    return Task(Poses(20), square_error, inputs, targets)
