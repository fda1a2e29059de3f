"""What a forward writes: state is the same function for every evaluation of a step, whoever evaluates it; the rest is
refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer, WorkerError
from tests.building import loaded

WORKERS = pytest.mark.parametrize("parallelize", [1, 2])


class Writing(nn.Module):
    """Adds what it keeps to its output, and writes it in each forward in one of several ways."""

    kept: torch.Tensor
    spectrum: torch.Tensor
    wide: torch.Tensor
    large: torch.Tensor
    unset: torch.Tensor | None

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.write = write
        self.ema = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.register_buffer("large", torch.zeros(2**20 + 1))
        self.register_buffer("unset", None)
        self.table = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self)
        kept = self.ema.sum() + self.spectrum.imag.sum() + self.wide.sum() + self.large[-1] + self.table[0]
        y: torch.Tensor = self.linear(x) + kept
        return y


STATE: dict[str, Callable[[Any], object]] = {
    "frozen parameter": lambda module: module.ema.add_(1),
    "frozen parameter, data": lambda module: module.ema.data.add_(1),
    "frozen parameter, replaced": lambda module: setattr(
        module, "ema", nn.Parameter(module.ema + 1, requires_grad=False)
    ),
    "complex buffer": lambda module: module.spectrum.add_(1j),
    "complex buffer, replaced": lambda module: setattr(module, "spectrum", module.spectrum + 1j),
    "expanded buffer": lambda module: module.wide[0].add_(1),
    "attribute": lambda module: module.table.add_(1),
}
DATA = torch.linspace(-1, 1, 24).view(8, 3), torch.linspace(0, 1, 8).view(8, 1)


def plain(module: nn.Module) -> float:
    """What torch computes in the next forward."""
    return nn.functional.mse_loss(module(DATA[0]), DATA[1]).item()


def evaluate(opt: BatchOptimizer, *batch: Any) -> float:
    """On a batch; the first one measures the workers."""
    opt.load(*batch)
    return opt.evaluate().item()


@WORKERS
@pytest.mark.parametrize("way", STATE)
def test_state_is_frozen_in_a_step_and_taken_over_at_its_end(way: str, parallelize: int) -> None:
    torch.manual_seed(0)
    alone = Writing(STATE[way])
    torch.manual_seed(0)
    with BatchOptimizer(Writing(STATE[way]), nn.MSELoss(), optimizer=None, parallelize=parallelize) as opt:
        for _ in range(3):
            opt.load(*DATA)
            found = [opt.evaluate().item() for _ in range(3)]
            assert found == pytest.approx([plain(alone)] * 3, rel=1e-6)


@WORKERS
@pytest.mark.parametrize("way", STATE)
def test_a_failed_step_puts_state_back(way: str, parallelize: int) -> None:
    class Fails(Writing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if x.sum() > 1000:
                raise ArithmeticError
            return y

    module = Fails(STATE[way])
    with loaded(module, nn.MSELoss(), *DATA, parallelize=parallelize) as opt:
        first = opt.evaluate().item()
        opt.load(*DATA)
        with pytest.raises(WorkerError, match="ArithmeticError"):
            evaluate(opt, DATA[0] + 1000, DATA[1])
        opt.load(*DATA)
        assert opt.evaluate().item() == pytest.approx(plain(module), rel=1e-6)
        assert opt.evaluate().item() != first


def nothing(module: Any) -> None:
    """Written."""


REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "too large": (
        lambda module: module.large.add_(1),
        ValueError,
        "forward writes 'large', which has 1048577 elements",
    ),
    "made": (lambda module: setattr(module, "unset", torch.ones(1)), WorkerError, "the buffer 'unset' was None"),
}


@WORKERS
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_apart_is_refused_by_name_and_stays_as_it_was(what: str, parallelize: int) -> None:
    write, error, message = REFUSED[what]
    module = Writing(write)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=parallelize) as opt:
        for _ in range(2):
            with pytest.raises(error, match=message):
                evaluate(opt, *DATA)
        assert not module.large.any()
        if what == "made":
            module(DATA[0])
        module.write = nothing
        opt.load(*DATA)
        assert opt.evaluate().item() == pytest.approx(plain(module), rel=1e-6)


@WORKERS
def test_a_tensor_that_the_loss_keeps_for_itself_is_refused(parallelize: int) -> None:
    running = torch.zeros(1)

    def loss_fn(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        running.add_(1)
        return nn.functional.mse_loss(module(x), y) + running.sum()

    with BatchOptimizer(nn.Linear(3, 1), loss_fn=loss_fn, optimizer=None, parallelize=parallelize) as opt:
        with pytest.raises(WorkerError, match=r"write the tensor 'loss_fn\.running', which is no buffer"):
            evaluate(opt, *DATA)
    assert parallelize == 1 or not running


class Halves(nn.Linear):
    """Writes its input if it is told to."""

    writes = "in place"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes == "in place":
            x /= 2
        elif self.writes == "by data":
            x.data /= 2
        elif self.writes == "by NumPy":
            x.numpy()[...] /= 2
        return super().forward(x)


@WORKERS
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_forward_that_writes_its_input_is_refused(parallelize: int, chunk_size: int | None, as_list: bool) -> None:
    module = Halves(3, 1)
    options: dict[str, Any] = {"parallelize": parallelize, "chunk_size": chunk_size, "speeds": [1.0] * parallelize}
    inputs, targets = (part.clone() for part in DATA)
    batch: Any = (list(inputs), list(targets)) if as_list else (inputs, targets)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, **options) as opt:
        for way in ("in place", "by data", "by NumPy"):
            module.writes = way
            opt.load(*batch)
            with pytest.raises(WorkerError, match="writes its `inputs` in place"):
                opt.evaluate()
        assert parallelize == 1 or torch.equal(inputs, DATA[0])
        module.writes = ""
        assert evaluate(opt, *batch) == pytest.approx(nn.functional.mse_loss(module(inputs), targets).item(), rel=1e-6)


@WORKERS
def test_a_forward_may_write_what_a_collate_function_makes(parallelize: int) -> None:
    def collate(pairs: list[Any]) -> Any:
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    module = Halves(3, 1)
    with loaded(module, nn.MSELoss(), list(DATA[0]), list(DATA[1]), parallelize=parallelize, collate_fn=collate) as opt:
        expected = nn.functional.mse_loss(module(DATA[0].clone()), DATA[1]).item()
        for _ in range(2):
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-6)
