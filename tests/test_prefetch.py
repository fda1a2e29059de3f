"""Batches that are read ahead."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from batchopt import Batches, BatchOptimizer, WorkerError
from batchopt._data.prefetch import Ahead, as_arguments
from batchopt.backends.process.backend import ProcessBackend
from batchopt.ignite import create_trainer, fit


class Pair(NamedTuple):
    """A batch of one structure."""

    first: int
    second: int


def test_each_item_is_prepared_once_and_in_order() -> None:
    prepared: list[int] = []

    def prepare(item: int) -> int:
        prepared.append(item)
        return 10 * item

    ahead = Ahead(range(3), prepare)
    assert next(ahead) == 0 and prepared == [0]
    ahead.fetch()
    ahead.fetch()
    assert prepared == [0, 1]
    assert list(ahead) == [10, 20]
    ahead.fetch()
    assert list(ahead) == [] and prepared == [0, 1, 2]


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
    "prepare_batch": lambda opt: [create_trainer(opt, prepare_batch=lambda _: next(iter(()))).run([1, 2])],
    "fit": lambda opt: [fit(opt, DataLoader(Stops(5), 2), epochs=1)],
}


def stop(*given: Any) -> Any:
    return next(iter(()))


@pytest.mark.sampled
@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("read", [*STOPS.values(), None], ids=[*STOPS, "of denominators"])
def test_stop_iteration_out_of_user_code_is_no_end_of_the_data(read: Any, parallelize: int) -> None:
    options: dict[str, Any] = {"parallelize": parallelize, "denominators": stop if read is None else None}
    words = "StopIteration" if read else "StopIteration was raised while a batch was read"
    read = read or (lambda opt: opt.steps([(torch.ones(4, 3), torch.ones(4, 1))]))
    with BatchOptimizer(linear().float(), nn.MSELoss(), optimizer="sgd", **options) as opt:
        with pytest.raises((RuntimeError, WorkerError), match=words):
            list(read(opt))


def test_what_a_loader_yields() -> None:
    assert as_arguments([1, 2]) == (1, 2, None)
    assert as_arguments((1,)) == (1, None, None)
    assert as_arguments((1, 2, 3)) == (1, 2, 3)
    assert as_arguments({"a": 1}) == ({"a": 1}, None, None)
    assert as_arguments(Pair(1, 2)) == (Pair(1, 2), None, None)
    with pytest.raises(ValueError, match="got 4 items"):
        as_arguments((1, 2, 3, 4))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of different sizes, larger and smaller."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 3, generator=generator).double(), torch.ones(n, 1).double()) for n in (8, 2000, 5, 8, 3000, 7)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("parallelize", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
def test_steps_are_the_steps_one_by_one(parallelize: int, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "parallelize": parallelize, "chunk_size": 4}
    with (
        BatchOptimizer(linear(), nn.MSELoss(), **options) as ahead,
        BatchOptimizer(linear(), nn.MSELoss(), **options) as opt,
    ):
        assert list(ahead.steps(batches())) == [opt.step(*batch) for batch in batches()]
        assert torch.equal(ahead.parameters, opt.parameters)


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


def test_evaluations_between_steps_see_the_batch_of_the_last_step() -> None:
    with BatchOptimizer(linear(), nn.MSELoss(), optimizer="sgd", parallelize=2) as opt:
        for i, _ in enumerate(opt.steps(batches())):
            inputs, targets = batches()[i]
            expected = nn.functional.mse_loss(opt.module(inputs), targets).item()
            assert opt.evaluate().item() == pytest.approx(expected, rel=1e-12)


def test_a_batch_that_is_loaded_twice_takes_memory_once() -> None:
    """Only a batch that is read ahead, or a worker that is late, needs room beside the present one."""
    (inputs, targets), *_ = batches()
    options = [0] * len(inputs)  # with which a batch is sent: of plain tensors workers are told nothing
    with BatchOptimizer(linear(), nn.MSELoss(), optimizer="sgd", parallelize=2) as opt:
        backend = opt._function.workers.backend
        assert isinstance(backend, ProcessBackend)
        opt.load(inputs, targets, options)  # measures the workers, so what they answered was heard
        for _ in range(2):
            opt.load(inputs, targets, options)
            for worker in backend._pool.workers.values():
                assert select.select([worker.channel], [], [], 10)[0]  # answered, and not heard yet
        assert [slot is not None for slot in backend._slots] == [True, False]


@pytest.mark.parametrize("parallelize", [1, 2])
def test_a_batch_that_was_read_ahead_has_the_loss_that_the_criterion_has_when_it_is_used(parallelize: int) -> None:
    inputs, targets = torch.randn(20, 3), torch.randint(0, 4, (20,))
    module, criterion = nn.Linear(3, 4), nn.CrossEntropyLoss()
    changes: list[tuple[str, Any]] = [("reduction", "sum"), ("weight", torch.rand(4)), ("reduction", "mean")]
    with BatchOptimizer(module, criterion, optimizer=None, parallelize=parallelize) as opt:
        for (name, value), batch in zip(changes, opt.prepared([(inputs, targets)] * 3), strict=True):
            setattr(criterion, name, value)
            opt.load(batch)
            opt.evaluate()  # and reads ahead
            assert opt.evaluate().item() == pytest.approx(criterion(module(inputs), targets).item(), rel=1e-5)
        total, _ = opt.full_gradient([(inputs[:5], targets[:5]), (inputs[5:], targets[5:])])
        assert total == pytest.approx(criterion(module(inputs), targets).item(), rel=1e-5)
        criterion.reduction = "none"
        with pytest.raises(ValueError, match="reduction='none'"):
            opt.load(inputs, targets)


def test_a_batch_that_was_read_ahead_may_be_stepped_on_by_other_workers() -> None:
    inputs, targets = torch.randn(20, 3), torch.randn(20, 1)
    module = nn.Linear(3, 1)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, parallelize=1) as opt:
        for parallelize, batch in zip([2, 3, 1], opt.prepared([(inputs, targets)] * 3), strict=True):
            opt.resize(parallelize)
            expected = nn.MSELoss()(module(inputs), targets).item()
            assert opt.step(batch) == pytest.approx(expected, rel=1e-5)
