"""The modules and data that the tests evaluate, and the slow readable reference: plain torch in one process.

Imported in worker processes too, so it must not import batchopt.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


def once(marker: Path) -> bool:
    """Whether nobody has asked before, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Mlp(nn.Module):
    """Two layers with tanh."""

    def __init__(self, inputs: int = 6, hidden: int = 9, outputs: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Recurrent(nn.Module):
    """Reads one sequence of any length, shape (length, 3), and returns scores of 2 classes, shape (2,)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        _, state = self.cell(sequence)
        y: torch.Tensor = self.head(state[-1])
        return y


class Burgers(nn.Module):
    """The residual u_t + u u_x - 0.01 u_xx of a small network u(t, x): its forward takes derivatives itself."""

    def __init__(self) -> None:
        super().__init__()
        self.u = Mlp(2, 8, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        points = points.detach().requires_grad_()
        u = self.u(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)
        residual: torch.Tensor = first[:, 0] + u[:, 0] * first[:, 1] - 0.01 * second[:, 1]
        return residual


def mean_square(residual: torch.Tensor) -> torch.Tensor:
    """The mean of the squares."""
    return residual.square().mean()


def misfit(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean square of what differs, as a loss function."""
    return difference(module, inputs, targets).square().mean()


def difference(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As residuals."""
    found: torch.Tensor = module(inputs) - targets
    return found


def size(module: nn.Module, inputs: torch.Tensor, targets: Any = None) -> torch.Tensor:
    """The mean square of the output, as a loss function."""
    return mean_square(module(inputs))


@dataclass
class Workload:
    """A module, its criterion, and a batch."""

    module: nn.Module
    criterion: Callable[..., torch.Tensor]
    inputs: Any
    targets: Any

    def reference(self) -> tuple[float, torch.Tensor]:
        """f and df/dX by plain torch, as one vector in the order of the parameters."""
        return reference(self.module, self.criterion, self.inputs, self.targets)


def reference(
    module: nn.Module, criterion: Callable[..., torch.Tensor], inputs: Any, targets: Any = None
) -> tuple[float, torch.Tensor]:
    """What one process computes on the whole batch. A list is a list of samples, and the loss their mean."""
    with torch.enable_grad():
        return _reference(module, criterion, inputs, targets)


def _reference(
    module: nn.Module, criterion: Callable[..., torch.Tensor], inputs: Any, targets: Any
) -> tuple[float, torch.Tensor]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if isinstance(inputs, list):
        losses = [criterion(module(x), y) for x, y in zip(inputs, targets, strict=True)]
        loss = torch.stack(losses).mean()
    elif targets is None:
        loss = criterion(module(inputs))
    else:
        loss = criterion(module(inputs), targets)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return loss.item(), torch.cat([part.reshape(-1) for part in parts])


def convolutional() -> nn.Module:
    """A small network for 8x8 images."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def mlp(dtype: torch.dtype = torch.float64, samples: int = 37) -> Workload:
    """Regression."""
    torch.manual_seed(1)
    return Workload(
        Mlp().to(dtype), nn.MSELoss(), torch.randn(samples, 6, dtype=dtype), torch.randn(samples, 4, dtype=dtype)
    )


def cnn(dtype: torch.dtype = torch.float64) -> Workload:
    """Classification of images."""
    torch.manual_seed(2)
    targets = torch.randint(0, 10, (41,))
    return Workload(convolutional().to(dtype), nn.CrossEntropyLoss(), torch.randn(41, 1, 8, 8, dtype=dtype), targets)


def rnn(dtype: torch.dtype = torch.float64) -> Workload:
    """Classification of sequences of different lengths, as a list of samples."""
    torch.manual_seed(3)
    inputs = [torch.randn(length, 3, dtype=dtype) for length in torch.randint(1, 9, (23,)).tolist()]
    targets = [torch.tensor(label) for label in torch.randint(0, 2, (23,)).tolist()]
    return Workload(Recurrent().to(dtype), nn.CrossEntropyLoss(), inputs, targets)


def burgers(dtype: torch.dtype = torch.float64) -> Workload:
    """A physics-informed residual, with second derivatives and without targets."""
    torch.manual_seed(4)
    return Workload(Burgers().to(dtype), mean_square, torch.rand(53, 2, dtype=dtype), None)


def logistic(dtype: torch.dtype = torch.float64) -> Workload:
    """Logistic regression with class weights and a few targets to ignore."""
    torch.manual_seed(5)
    targets = torch.randint(0, 3, (67,))
    targets[10:14] = -100
    criterion = nn.CrossEntropyLoss(weight=torch.rand(3, dtype=dtype))
    return Workload(nn.Linear(12, 3).to(dtype), criterion, torch.randn(67, 12, dtype=dtype), targets)


WORKLOADS: dict[str, Callable[[torch.dtype], Workload]] = {
    "mlp": mlp,
    "cnn": cnn,
    "rnn": rnn,
    "burgers": burgers,
    "logistic": logistic,
}


class Pairs(Dataset[Any]):
    """A dataset of the samples in tensors. What is read is noted in the file `notes`; whoever reads sample `deadly`
    first, other than the process that made this, is killed."""

    def __init__(
        self, inputs: torch.Tensor, targets: torch.Tensor, notes: Path | None = None, deadly: int | None = None
    ) -> None:
        self.inputs, self.targets, self.notes, self.deadly = inputs, targets, notes, deadly
        self.maker = os.getpid()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.notes is not None:
            before = self.read()
            with self.notes.open("a") as file:
                file.write(f"{index}\n")
            if index == self.deadly and index not in before and os.getpid() != self.maker:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.inputs[index], self.targets[index]

    def read(self) -> list[int]:
        """The samples that were read, in order."""
        if self.notes is None or not self.notes.exists():
            return []
        return [int(line) for line in self.notes.read_text().split()]


class Listed(Dataset[Any]):
    """Any items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Noisy(Pairs):
    """Each reading adds other noise, of torch, NumPy and `random`."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.randn(()).item() + np.random.rand() + random.random(), y


class Broken(Pairs):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 7:
            raise FileNotFoundError("no such picture")
        return super().__getitem__(index)
