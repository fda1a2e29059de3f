"""The functions that the benchmarks evaluate: a module, its loss, and a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn


@dataclass
class Workload:
    """`loss(module, inputs, targets)` over the whole batch is the function."""

    module: nn.Module
    loss: Callable[[nn.Module, Any, Any], torch.Tensor]
    inputs: torch.Tensor
    targets: torch.Tensor | None


class Supervised:
    """`criterion(module(inputs), targets)`."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion = criterion

    def __call__(self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(module(inputs), targets)
        return loss


class Recurrent(nn.Module):
    """A GRU, whose last state is mapped to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(16, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.cell(x)[0][:, -1])
        return found


def burgers(module: nn.Module, points: torch.Tensor, targets: None) -> torch.Tensor:
    """The mean square of the residual u_t + u u_x - (0.01 / pi) u_xx at the points (t, x)."""
    points = points.detach().requires_grad_()
    u = module(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)
    residual = first[:, 0] + u[:, 0] * first[:, 1] - 0.01 / torch.pi * second[:, 1]
    mean: torch.Tensor = residual.square().mean()
    return mean


def _classes(samples: int, classes: int = 10) -> torch.Tensor:
    return torch.randint(0, classes, (samples,))


def mlp() -> Workload:
    """784-256-10, tanh; 8,192 samples."""
    module = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10))
    return Workload(module, Supervised(nn.CrossEntropyLoss()), torch.randn(8192, 784), _classes(8192))


def cnn() -> Workload:
    """Two 3x3 convolutions, 16 and 32 channels, with pooling, on 28x28 images; 1,024 samples."""
    module = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )
    return Workload(module, Supervised(nn.CrossEntropyLoss()), torch.randn(1024, 1, 28, 28), _classes(1024))


def pinn() -> Workload:
    """The residual of Burgers' equation for a network of 8 layers of 20, tanh; 10,000 points."""
    layers: list[nn.Module] = [nn.Linear(2, 20), nn.Tanh()]
    for _ in range(7):
        layers += [nn.Linear(20, 20), nn.Tanh()]
    return Workload(nn.Sequential(*layers, nn.Linear(20, 1)), burgers, torch.rand(10_000, 2), None)


def logreg() -> Workload:
    """Multinomial logistic regression, 784 features, 10 classes; 20,000 samples."""
    return Workload(nn.Linear(784, 10), Supervised(nn.CrossEntropyLoss()), torch.randn(20_000, 784), _classes(20_000))


def wide() -> Workload:
    """1024-4096-1024-10, tanh: 8.4 million parameters; 512 samples."""
    module = nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 1024), nn.Tanh(), nn.Linear(1024, 10))
    return Workload(module, Supervised(nn.CrossEntropyLoss()), torch.randn(512, 1024), _classes(512))


def tiny() -> Workload:
    """1-1, two samples: nothing but what it takes to ask and to answer."""
    return Workload(nn.Linear(1, 1), Supervised(nn.MSELoss()), torch.randn(2, 1), torch.randn(2, 1))


def matrix(rows: int, columns: int) -> Callable[[], Workload]:
    """One linear layer without bias, and eight samples: little to compute for its size."""

    def make() -> Workload:
        module = nn.Linear(columns, rows, bias=False)
        return Workload(module, Supervised(nn.MSELoss()), torch.randn(8, columns), torch.randn(8, rows))

    return make


WORKLOADS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "cnn": cnn, "pinn": pinn, "logreg": logreg, "wide": wide}


def dense(layers: list[int], samples: int) -> Callable[[], Workload]:
    """A regression by a network with tanh."""

    def make() -> Workload:
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(layers):
            parts += [nn.Linear(inputs, outputs), nn.Tanh()]
        data = torch.randn(samples, layers[0]), torch.randn(samples, layers[-1])
        return Workload(nn.Sequential(*parts[:-1]), Supervised(nn.MSELoss()), *data)

    return make


def physics(samples: int) -> Callable[[], Workload]:
    """Burgers' equation, with second derivatives."""

    def make() -> Workload:
        module = dense([2, *[20] * 8, 1], 1)().module
        return Workload(module, burgers, torch.rand(samples, 2), None)

    return make


def convolutional(samples: int) -> Callable[[], Workload]:
    """Two convolutions on images of 28x28."""

    def make() -> Workload:
        body = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten())
        module = nn.Sequential(*body, nn.LazyLinear(10))
        images = torch.randn(samples, 1, 28, 28)
        module(images[:1])
        return Workload(module, Supervised(nn.CrossEntropyLoss()), images, torch.randint(0, 10, (samples,)))

    return make


def recurrent() -> Workload:
    """Sequences of 30."""
    return Workload(Recurrent(), Supervised(nn.MSELoss()), torch.randn(256, 30, 16), torch.randn(256, 1))


def attention() -> Workload:
    """Two layers of a transformer on sequences of 32."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * 64, 1))
    return Workload(module, Supervised(nn.MSELoss()), torch.randn(128, 32, 64), torch.randn(128, 1))


FUNCTIONS: dict[str, Callable[[], Workload]] = {
    "20-20, 10,000": dense([2, 20, 20, 1], 10_000),
    "20-20, 20,000": dense([2, 20, 20, 1], 20_000),
    "20 layers of 64, 1,000": dense([16, *[64] * 20, 1], 1000),
    "20 layers of 64, 20,000": dense([16, *[64] * 20, 1], 20_000),
    "784-256-10, 512": dense([784, 256, 10], 512),
    "784-256-10, 8,192": dense([784, 256, 10], 8192),
    "1024-1024-1024-10, 256": dense([1024, 1024, 1024, 10], 256),
    "Burgers, 300": physics(300),
    "Burgers, 3,000": physics(3000),
    "Burgers, 30,000": physics(30_000),
    "Burgers, 100,000": physics(100_000),
    "convolutions, 64": convolutional(64),
    "convolutions, 1,024": convolutional(1024),
    "GRU, 256 of 30": recurrent,
    "transformer, 128 of 32": attention,
}


def build(name: str) -> Workload:
    """The workload `name`, the same each time."""
    torch.manual_seed(0)
    others = {"tiny": tiny, "10,000": matrix(100, 100), "8.4 million": matrix(4096, 2048)}
    return {**WORKLOADS, **FUNCTIONS, **others}[name]()
