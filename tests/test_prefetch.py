"""Batches that are read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from batchopt import Batches, BatchOptimizer, WorkerError, extending
from batchopt.training import fit


class Pair(NamedTuple):
    """A batch of one structure."""

    first: Any
    second: Any


class Stops(Dataset[Any]):
    """Raises StopIteration, as a `next` without a default does, where it is asked for its length or for an item."""

    def __init__(self, item: int | None) -> None:
        self.item = item

    def __len__(self) -> int:
        return next(iter(())) if self.item is None else 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3), next(iter(())) if index == self.item else torch.ones(1)


STOPS: dict[str, Any] = {
    "__len__": lambda opt: opt.steps([Stops(None)]),
    "__getitem__": lambda opt: opt.steps([Stops(5)]),
    "of a loader": lambda opt: opt.steps(DataLoader(Stops(5), 2)),
    "of a loader with workers": lambda opt: opt.steps(DataLoader(Stops(5), 2, num_workers=1)),
    "of Batches of a loader": lambda opt: opt.steps(Batches(DataLoader(Stops(5), 2))),
    "of Batches": lambda opt: opt.steps(Batches(Stops(5), 2)),
    "predicting": lambda opt: opt.iter_predict(DataLoader(Stops(5), 2)),
    "convert": lambda opt: extending.prepared(opt, [1, 2], convert=lambda _: next(iter(()))),
    "fit": lambda opt: [fit(opt, DataLoader(Stops(5), 2), epochs=1)],
}


def stop(*given: Any) -> Any:
    return next(iter(()))


@pytest.mark.rows
@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("read", [*STOPS.values(), None], ids=[*STOPS, "of denominators"])
def test_stop_iteration_out_of_user_code_is_no_end_of_the_data(read: Any, parallelize: int) -> None:
    options: dict[str, Any] = {"parallelize": parallelize, "denominators": stop if read is None else None}
    words = "StopIteration" if read else "StopIteration was raised while a batch was read"
    read = read or (lambda opt: opt.steps([(torch.ones(4, 3), torch.ones(4, 1))]))
    with BatchOptimizer(linear().float(), nn.MSELoss(), optimizer="sgd", **options) as opt:
        with pytest.raises((RuntimeError, WorkerError), match=words):
            list(read(opt))


@pytest.mark.rows
@pytest.mark.parametrize("batch", [[0, 1], (0,), (0, 1, ["a"] * 4), {"a": 0}, Pair(0, 1)], ids=str)
def test_what_a_loader_yields(batch: Any) -> None:
    """Lists and tuples are arguments of `load`; a dict and a named tuple are the inputs."""
    x = torch.ones(4, 3).double()
    made: list[Any] = [
        x if value in (0, 1) else value for value in (batch.values() if isinstance(batch, dict) else batch)
    ]
    given: Any = {"a": x} if isinstance(batch, dict) else type(batch)(made) if type(batch) is not Pair else Pair(*made)

    def loss_fn(module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        arguments = [type(inputs), targets is None]
        whole = isinstance(batch, (dict, Pair))
        assert arguments == [type(given) if whole else torch.Tensor, whole or len(batch) < 2]
        loss: torch.Tensor = module(x).mean()
        return loss

    with BatchOptimizer(linear(), loss_fn=loss_fn, posthook=lambda worker, sample: sample.options) as opt:
        assert len([*opt.steps([given])]) == 1
        assert opt.hook_results == [["a"] * 4 if len(batch) == 3 else None]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of different sizes, larger and smaller."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 3, generator=generator).double(), torch.ones(n, 1).double()) for n in (8, 2000, 5, 8, 3000, 7)
    ]


def unreadable() -> Iterator[Any]:
    yield batches()[0]
    raise OSError("no such file")


EMPTY = torch.zeros(0, 3).double(), torch.zeros(0, 1).double()


@pytest.mark.parametrize("source, error", [(lambda: iter([batches()[0], EMPTY]), ValueError), (unreadable, OSError)])
def test_a_batch_that_cannot_be_read_fails_its_own_step(source: Any, error: type[Exception]) -> None:
    with BatchOptimizer(linear(), nn.MSELoss(), optimizer="sgd", parallelize=2) as opt:
        steps = opt.steps(source())
        next(steps)
        with pytest.raises(error):
            next(steps)
        assert opt.batch_counter == 1
        opt.step(*batches()[0])


def test_the_next_batch_is_read_while_workers_compute() -> None:
    events: list[str] = []

    class Noting(BatchOptimizer):
        def map(self) -> Any:
            events.append("map")
            answers = super().map()
            events.append("mapped")
            return answers

    def source() -> Iterator[Any]:
        for batch in batches()[:3]:
            events.append("read")
            yield batch

    with Noting(linear(), nn.MSELoss(), optimizer="sgd", parallelize=2) as opt:
        assert len(list(opt.steps(source()))) == 3
        assert opt.batch_counter == 3
    assert events == ["read", "map", "read", "mapped", "map", "read", "mapped", "map", "mapped"]


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_batch_that_was_read_ahead_has_the_loss_that_the_criterion_has_when_it_is_used(parallelize: int) -> None:
    inputs, targets = torch.randn(20, 3), torch.randint(0, 4, (20,))
    module, criterion = nn.Linear(3, 4), nn.CrossEntropyLoss()
    changes: list[tuple[str, Any]] = [("reduction", "sum"), ("weight", torch.rand(4)), ("reduction", "mean")]
    with BatchOptimizer(module, criterion, optimizer=None, parallelize=parallelize) as opt:
        for (name, value), batch in zip(changes, extending.prepared(opt, [(inputs, targets)] * 3), strict=True):
            setattr(criterion, name, value)
            opt.load(batch)
            opt.evaluate()  # and reads ahead
            assert opt.evaluate().item() == pytest.approx(criterion(module(inputs), targets).item(), rel=1e-5)
        total, _ = opt.full_gradient([(inputs[:5], targets[:5]), (inputs[5:], targets[5:])])
        assert total == pytest.approx(criterion(module(inputs), targets).item(), rel=1e-5)
        criterion.reduction = "none"
        with pytest.raises(ValueError, match="reduction='none'"):
            opt.load(inputs, targets)
