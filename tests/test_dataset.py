"""Batches that are map-style datasets: workers read the samples of their chunks themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from batchopt import Batches, BatchOptimizer, WorkerError
from tests.building import loaded
from tests.workloads import Listed, Mlp, Noisy, Pairs, mlp, reference

EACH = pytest.mark.parametrize("parallelize", [1, 2])


class NeverHere(Pairs):
    """Can be read in other processes only."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert os.getpid() != self.maker
        return super().__getitem__(index)


def check(opt: BatchOptimizer, data: Any, loss: float, gradient: torch.Tensor) -> None:
    opt.load(data)
    assert opt.evaluate().item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(opt.grad_parameters, gradient, rtol=1e-12, atol=1e-14)


# Forms


def test_batches_of_a_dataset_are_read_in_the_workers_and_have_the_bits_of_tensors() -> None:
    def run(data: Any) -> tuple[list[float], str]:
        torch.manual_seed(0)
        with BatchOptimizer(Mlp(), nn.MSELoss(), optimizer="sgd", parallelize=2, chunk_size=3) as opt:
            batches = Batches(data, 16, shuffle=True)
            losses = [loss for _ in range(2) for loss in opt.steps(batches)]
            return losses, opt.fingerprint()

    torch.manual_seed(1)
    x, y = torch.randn(52, 6), torch.randn(52, 4)
    assert run(NeverHere(x, y)) == run((x, y))


# What is kept


@pytest.mark.slow
@EACH
@pytest.mark.usefixtures("nobody_late")
def test_each_sample_is_read_once_or_in_each_evaluation(parallelize: int, tmp_path: Path) -> None:
    case = mlp(samples=40)
    for cache, times in ((True, 1), (False, 4)):
        data = Pairs(case.inputs, case.targets, tmp_path / f"notes {cache}")
        options: dict[str, Any] = {"chunk_size": 5, "parallelize": parallelize, "speeds": [1.0] * parallelize}
        with loaded(case.module, case.criterion, data, cache=cache, **options) as opt:
            assert data.read() == []
            first = opt.evaluate().item()
            assert set(data.read()) == set(range(40))
            assert [opt.evaluate().item() for _ in range(3)] == [first] * 3
        # and each audit, of evaluations 1, 2 and 4, reads what it compares twice
        assert len(data.read()) == 40 * times + 3 * 2 * 5 * parallelize


class Drawn(Dataset[Any]):
    """Items that are others each time they are read."""

    def __init__(self, classes: bool = False) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        (number,) = os.urandom(1)
        target = torch.tensor(number % 4) if self.classes else torch.tensor([number / 256])
        return torch.tensor([1.0, 2.0, index]), target


@EACH
def test_items_that_are_others_when_they_are_read_again_are_refused(parallelize: int) -> None:
    with loaded(nn.Linear(3, 1), nn.MSELoss(), Drawn(), parallelize=parallelize, chunk_size=4, check_cut=False) as opt:
        with pytest.raises(WorkerError, match=r"this worker would find another f.*or of the samples"):
            opt.evaluate()


@EACH
@pytest.mark.parametrize("denominators", [None, lambda inputs, targets: targets + 1.0], ids=["weights", "denominators"])
def test_targets_that_are_others_than_in_the_pass_before_are_refused(parallelize: int, denominators: Any) -> None:
    criterion = nn.CrossEntropyLoss(weight=None if denominators else torch.tensor([0.1, 1.0, 2.0, 5.0]))
    with BatchOptimizer(
        nn.Linear(3, 4), criterion, optimizer=None, parallelize=parallelize, denominators=denominators
    ) as opt:
        with pytest.raises(WorkerError, match=r"sample \d+.*its denominator is .*, and was .* when it was first read"):
            opt.load(Drawn(classes=True))
            opt.evaluate()


def test_what_draws_or_is_written_is_read_again_and_the_callers_draws_stay(tmp_path: Path) -> None:
    case = mlp(samples=8)

    def halve(worker: Any, sample: Any) -> None:
        sample.inputs.div_(2)

    for data, hook in (
        (Noisy(case.inputs, case.targets, tmp_path / "noisy"), None),
        (Pairs(case.inputs, case.targets, tmp_path / "written"), halve),
    ):
        before = torch.get_rng_state()
        with loaded(case.module, case.criterion, data, chunk_size=4, prehook=hook) as opt:
            first = opt.evaluate().item()
            assert [opt.evaluate().item() for _ in range(2)] == [first] * 2
            read = 8 * 3 if hook else 8
            assert len(data.read()) == read + 2 * 2 * 4 and torch.equal(torch.get_rng_state(), before)


# Means


@pytest.mark.slow
@EACH
def test_denominators_are_asked_for_once_chunk_by_chunk(parallelize: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, criterion = nn.Conv1d(3, 4, 1).double(), nn.CrossEntropyLoss()
    x, y = torch.randn(12, 3, 5).double(), torch.randint(0, 4, (12, 5))
    y[torch.rand(12, 5) < 0.6] = -100
    data = Pairs(x, y, tmp_path / "notes")

    def denominators(inputs: Any, targets: Any) -> torch.Tensor:
        assert len(inputs) <= 6  # an equal share, which the first measurement may be of
        counts: torch.Tensor = (targets != -100).reshape(len(targets), -1).sum(1)
        return counts

    given: dict[str, Any] = {"denominators": denominators, "chunk_size": 4, "check_cut": False}
    with BatchOptimizer(module, criterion, optimizer=None, parallelize=parallelize, **given) as opt:
        check(opt, data, *reference(module, criterion, x, y))
        if parallelize == 1:
            assert sorted(data.read()) == sorted([*range(12)] * 2 + [8, 9, 10, 11] * 2)  # an audit reads the last chunk


@EACH
def test_a_target_that_is_ignored_is_named(parallelize: int) -> None:
    torch.manual_seed(0)
    module, criterion = nn.Linear(3, 4).double(), nn.CrossEntropyLoss(ignore_index=2)
    x, y = torch.randn(12, 3).double(), torch.tensor([0, 1, 3] * 4)
    with BatchOptimizer(module, criterion, optimizer=None, chunk_size=5, parallelize=parallelize) as opt:
        check(opt, Pairs(x, y), *reference(module, criterion, x, y))
        y[8] = 2
        opt.load(Pairs(x, y))
        with pytest.raises(
            WorkerError, match=r"ValueError in worker \d, sample 8: its target has .* ignore_index, 2: "
        ):
            opt.evaluate()


# What cannot be


def weighing(weight: Any) -> dict[str, Any]:
    """A mean of squares with these denominators."""

    def loss_fn(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = (module(x) - y).square().sum(1)
        loss: torch.Tensor = (each * weight(x, y)).sum() / weight(x, y).sum()
        return loss

    return {"loss_fn": loss_fn, "denominators": weight}


@pytest.mark.parametrize("options", [{"chunk_size": 8}, {"parallelize": 2}])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_input_gradients_by_what_the_denominators_are_made_of_are_refused(
    as_dataset: bool, options: dict[str, Any]
) -> None:
    x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    data: Any = (Pairs(x, y),) if as_dataset else (x, y)
    given = {**weighing(lambda x, y: x.abs().sum(1)), **options}
    with loaded(nn.Linear(3, 1).double(), None, *data, **given) as opt:
        for asked in ((), data):
            with pytest.raises((ValueError, WorkerError), match="`denominators` is made of the inputs"):
                opt.input_gradients(*asked)


def test_input_gradients_where_the_denominators_count() -> None:
    x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    x[x < -1] = 0.0  # padding
    module, given = nn.Linear(3, 1).double(), weighing(lambda x, y: (x != 0).sum(1))
    with loaded(module, None, x, y, chunk_size=8, **given) as opt:
        inputs = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(given["loss_fn"](module, inputs, y), inputs)
        torch.testing.assert_close(opt.input_gradients(), expected)


class OfTwo(nn.Linear):
    """A module of two inputs."""

    def forward(self, inputs: Any) -> Any:
        assert isinstance(inputs, tuple)
        return super().forward(inputs[0]) + inputs[1].sum(-1, keepdim=True)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_list_that_a_loader_has_made_of_tuples_is_columns_and_any_other_is_samples(size: int) -> None:
    """Also of two samples, where their numbers do not tell."""
    module, data = OfTwo(2, 1), Listed(*[((torch.full((2,), 0.1 * i), torch.ones(3)), torch.ones(1)) for i in range(6)])
    (one, other), targets = torch.utils.data.default_collate([*data.items])
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None) as opt:
        f, _ = opt.full_gradient(DataLoader(data, batch_size=size))
        assert float(f) == pytest.approx(nn.MSELoss()(module((one, other)), targets).item(), rel=1e-6)
        opt.load((one, other), targets)
        assert opt.evaluate().item() == pytest.approx(float(f), rel=1e-6)
        opt.load([(a, b) for a, b in zip(one, other, strict=True)], [*targets])
        assert opt.evaluate().item() == pytest.approx(float(f), rel=1e-6)
        with pytest.raises(ValueError, match="a list has one entry a sample; pass a tuple of columns"):
            opt.load([one, other], targets)
