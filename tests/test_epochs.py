"""Batches: their order, their position, and going on from it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from batchopt import Batches, BatchoptError, BatchOptimizer, WorkerError, extending
from tests.workloads import Pairs

X = torch.arange(20.0).view(10, 2)
Y = torch.arange(10)
EACH = pytest.mark.parametrize("parallelize", [1, 2])


class Endless(IterableDataset[Any]):
    """Samples without an index."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(X)


def saved(batches: Batches) -> dict[str, int]:
    """The state, through a file."""
    file = io.BytesIO()
    torch.save(batches.state_dict(), file)
    state: dict[str, int] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return state


def indices(batch: Any) -> list[int]:
    """The samples in a batch of `Y`, or of pairs with it."""
    if isinstance(batch, Dataset):
        return [int(batch[i][1]) for i in range(len(batch))]  # type: ignore[arg-type]
    return [int(i) for i in (batch[1] if isinstance(batch, (tuple, list)) else batch)]


# The order


def test_an_iteration_is_an_epoch_in_an_order_of_seed_and_epoch_alone() -> None:
    numpy_state: Any = np.random.get_state()
    states = torch.get_rng_state(), numpy_state[1], random.getstate()
    batches = Batches(Y, 3, shuffle=True, seed=5)
    epochs = [[indices(batch) for batch in batches] for _ in range(3)]
    assert [list(map(len, epoch)) for epoch in epochs] == [[3, 3, 3, 1]] * 3 and len(batches) == 4
    assert all(sorted(chain.from_iterable(epoch)) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    torch.manual_seed(77)
    again = Batches(Y, 3, shuffle=True, seed=5)
    assert [[indices(batch) for batch in again] for _ in range(3)] == epochs
    assert [indices(batch) for batch in Batches(Y, 3, shuffle=True, seed=6)] != epochs[0]
    torch.set_rng_state(states[0])
    list(Batches(Y, 3, shuffle=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    numpy_state = np.random.get_state()
    assert np.array_equal(numpy_state[1], states[1]) and random.getstate() == states[2]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "data",
    [Y, Y.numpy(), (X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y), Pairs(X, Y), [*zip(X, Y, strict=True)]],
    ids=["tensor", "array", "tensors", "arrays", "TensorDataset", "Dataset", "list"],
)
def test_every_form_of_data_has_the_same_batches(data: Any, shuffle: bool) -> None:
    expected = [indices(batch) for batch in Batches(Y, 4, shuffle=shuffle, seed=1)]
    assert [indices(batch) for batch in Batches(data, 4, shuffle=shuffle, seed=1)] == expected
    (whole,) = Batches(data)
    assert indices(whole) == list(range(10))
    assert [len(indices(batch)) for batch in Batches(data, 4, drop_last=True)] == [4, 4]


def test_what_batches_are_made_of(tmp_path: Any) -> None:
    """Subsets of a dataset, which are read by whoever uses them unless there is a collate_fn; structures, with the
    lists beside tensors; copies of a file that can only be read."""
    data = Pairs(X, Y)
    batch = next(iter(Batches(data, 4)))
    assert isinstance(batch, Subset) and batch.dataset is data
    assert next(iter(Batches(data))) is data

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    x, y = next(iter(Batches(data, 4, shuffle=True, collate_fn=collate)))
    assert torch.equal(x[:, 0], 2.0 * y) and len(y) == 4
    structure = {"x": X, "names": [f"n{i}" for i in range(10)], "unit": "m"}
    batch = next(iter(Batches(structure, 3, shuffle=True)))
    assert batch["unit"] == "m" and [f"n{int(x / 2)}" for x in batch["x"][:, 0]] == batch["names"]
    np.save(tmp_path / "x.npy", X.numpy())
    found = list(Batches(np.load(tmp_path / "x.npy", mmap_mode="r"), 4))
    assert torch.equal(torch.cat(found), X) and all(isinstance(batch, torch.Tensor) for batch in found)


# The position


def test_the_counters_are_those_of_chainers_iterators() -> None:
    batches = Batches(Y, 4)
    assert (batches.epoch, batches.iteration, batches.is_new_epoch) == (0, 0, False)
    assert (batches.epoch_detail, batches.previous_epoch_detail) == (0.0, None)
    seen = []
    for _ in range(2):
        for _ in batches:
            seen.append((batches.epoch, batches.is_new_epoch, batches.epoch_detail, batches.previous_epoch_detail))
    assert seen == [
        (0, False, 0.4, 0.0),
        (0, False, 0.8, 0.4),
        (1, True, 1.0, 0.8),
        (1, False, 1.4, 1.0),
        (1, False, 1.8, 1.4),
        (2, True, 2.0, 1.8),
    ]
    assert batches.iteration == 6
    dropping = Batches(Y, 4, drop_last=True)
    assert [dropping.epoch_detail for _ in dropping] == [0.5, 1.0]


MAKES: dict[str, Callable[[], Batches]] = {
    "tensor": lambda: Batches(Y, 3, shuffle=True, seed=2),
    "dataset": lambda: Batches(Pairs(X, Y), 4, shuffle=True),
    "loader": lambda: Batches(DataLoader(Pairs(X, Y), batch_size=3)),
    "loader without a length": lambda: Batches(DataLoader(Endless(), batch_size=3, collate_fn=lambda xs: [0, xs[0]])),
}


@pytest.mark.filterwarnings("ignore:going on in epoch:UserWarning")
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@given(stop=st.integers(0, 11))
@settings(max_examples=12, deadline=None)
def test_what_goes_on_from_a_state_has_the_batches_that_come(make: Callable[[], Batches], stop: int) -> None:
    def run(batches: Batches) -> Iterator[list[int]]:
        while True:
            for batch in batches:
                yield indices(batch)

    expected = list(islice(run(make()), 14))
    stopped = make()
    assert list(islice(run(stopped), stop)) == expected[:stop]
    resumed = make()
    resumed.load_state_dict(saved(stopped))
    for name in ("epoch", "iteration", "is_new_epoch"):
        assert getattr(resumed, name) == getattr(stopped, name)
    assert list(islice(run(resumed), 14 - stop)) == expected[stop:]


def test_an_iteration_that_was_left_goes_on_in_the_next_one_and_a_loader_says_that_it_skips() -> None:
    batches = Batches(Y, 3)
    next(iter(batches))
    assert [indices(batch) for batch in batches] == [[3, 4, 5], [6, 7, 8], [9]]
    assert indices(next(iter(batches))) == [0, 1, 2]
    batches = Batches(DataLoader(Pairs(X, Y), batch_size=3))
    next(iter(batches))
    with pytest.warns(UserWarning, match=r"going on in epoch 0 of a loader \(DataLoader\): its first 1 batches are"):
        assert indices(next(iter(batches))) == [3, 4, 5]


def test_two_iterations_at_a_time_are_found_out() -> None:
    batches = Batches(Y, 3)
    one, two = iter(batches), iter(batches)
    next(one)
    next(two)
    with pytest.raises(RuntimeError, match=r"batch 1 of epoch 0 is not the next one: .* at batch 2 of epoch 0"):
        next(one)


# In steps


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(50, 3, generator=generator).double(), torch.randn(50, 1, generator=generator).double()


def optimizer(parallelize: int, **options: Any) -> BatchOptimizer:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1)).double()
    given = {"optimizer": "sgd", "parallelize": parallelize, "chunk_size": 4, **options}
    return BatchOptimizer(module, nn.MSELoss(), **given)


LOOPS: dict[str, Callable[[BatchOptimizer, Batches], Iterator[float]]] = {
    "steps": lambda opt, batches: opt.steps(batches),
    "prepared": lambda opt, batches: (opt.step(batch) for batch in extending.prepared(opt, batches)),
}


@pytest.mark.rows
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_that_is_stopped_anywhere_goes_on_bit_for_bit(loop: Any, stop: int) -> None:
    def batches() -> Batches:
        return Batches(data(), 15, shuffle=True, seed=3)

    def run(opt: BatchOptimizer, batches: Batches, count: int) -> list[float]:
        losses: list[float] = []
        while len(losses) < count:
            for loss in loop(opt, batches):
                losses.append(loss)
                if len(losses) == count:  # a loop that saves in its body, and ends
                    states.append((opt.state_dict(), saved(batches)))
                    break
        return losses

    states: list[Any] = []
    with optimizer(1) as opt:
        whole = run(opt, batches(), 10)
        expected = opt.parameters.clone()
    with optimizer(1) as opt:
        first = run(opt, batches(), stop)
    with optimizer(1) as opt:
        state, position = states[-1]
        opt.load_state_dict(state)
        resumed = batches()
        resumed.load_state_dict(position)
        assert resumed.iteration == stop
        rest = run(opt, resumed, 10 - stop)
        assert torch.equal(opt.parameters, expected)
    assert first + rest == whole


@EACH
@pytest.mark.parametrize("loop", [LOOPS["steps"], LOOPS["prepared"]])
def test_a_step_that_fails_does_not_count_nor_what_was_read_ahead(loop: Any, parallelize: int) -> None:
    x, y = data()
    with optimizer(parallelize, prehook=lambda worker, sample: 1 / (sample.inputs < 100).all().item()) as opt:
        batches = Batches((x, y), 10)
        losses = loop(opt, batches)
        next(losses)
        next(losses)
        assert batches.iteration == 2
        x[20:30] += 200
        losses = loop(opt, batches)
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            next(losses)
        assert (batches.iteration, opt.batch_counter) == (2, 2)
        x[20:30] -= 200
        assert len(list(loop(opt, batches))) == 3 and batches.is_new_epoch


@EACH
def test_prepared_batches_may_be_passed_over_and_are_used_once_in_their_turn_with_their_optimizer(
    parallelize: int,
) -> None:
    x, y = data()
    with optimizer(parallelize) as opt, optimizer(1) as other:
        ahead = extending.prepared(opt, [(x, y), (x[:9], y[:9]), (x[:8], y[:8])])
        first = next(ahead)
        with pytest.raises(BatchoptError, match="prepared by another BatchOptimizer"):
            other.step(first)
        with pytest.raises(ValueError, match="leave `targets` and `options` out"):
            opt.step(first, y)
        opt.step(first)
        with pytest.raises(BatchoptError, match="it was used already"):
            opt.step(first)
        second = next(ahead)
        third = next(ahead)
        for late in (first, second):
            with pytest.raises(BatchoptError, match="its turn is over"):
                opt.load(late)
        opt.load(third)
        assert opt.evaluate() > 0 and opt.batch_counter == 1
        batches = Batches(data(), 10)
        for i, batch in enumerate(extending.prepared(opt, batches)):
            if i % 2:
                assert len(batch) == 10 and opt.step(batch) > 0
        assert (batches.epoch, batches.iteration, opt.batch_counter) == (1, 5, 3)


@EACH
def test_an_error_says_which_samples_of_the_data_it_is_about(parallelize: int) -> None:
    data = torch.linspace(0.0, 1.0, 40)[:, None]

    def fail(module: nn.Module, x: torch.Tensor, _: None) -> torch.Tensor:
        if bool(x.eq(data[17]).any()):
            raise ArithmeticError("\udcff cannot be printed")
        loss: torch.Tensor = module(x).square().mean()
        return loss

    options: dict[str, Any] = {"loss_fn": fail, "optimizer": "sgd", "chunk_size": 1, "check_cut": False}
    with BatchOptimizer(nn.Linear(1, 1), parallelize=parallelize, speeds=[1.0] * parallelize, **options) as opt:
        with pytest.raises(WorkerError, match=r", sample \d+: \\udcff .* \[of the data: 17\]$"):
            list(opt.steps(Batches(data, 10, shuffle=True, seed=3)))
        with pytest.raises(WorkerError, match=r"cannot be printed$"):
            opt.step(data)
