"""The doors for code around an optimizer: they show what there is, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import batchopt
from batchopt import Batches, BatchOptimizer, CheckpointError, extending
from tests.workloads import mlp

both = pytest.mark.parametrize("parallelize", [1, 2])


def optimizer(parallelize: int = 1, **options: Any) -> BatchOptimizer:
    """One with a batch."""
    case = mlp()
    opt = BatchOptimizer(case.module, case.criterion, parallelize=parallelize, **options)
    opt.load(case.inputs, case.targets)
    return opt


@pytest.mark.slow
@both
def test_what_is_evaluated_apart_leaves_no_trace(parallelize: int) -> None:
    case = mlp()
    with optimizer(parallelize, chunk_size=4) as opt, optimizer(parallelize, chunk_size=4) as other:
        assert (extending.batch_size(opt), extending.chunk_size(opt)) == (len(case.inputs), 4)
        with extending.examining(opt, chunk_size=7):
            opt.load(case.inputs[:20], case.targets[:20])
            assert (extending.batch_size(opt), extending.chunk_size(opt)) == (20, 7)
            opt.evaluate()
        with pytest.raises(batchopt.BatchoptError, match="no batch was loaded"):
            _ = extending.batch_size(opt)
        for one in (opt, other):
            one.step(case.inputs, case.targets)
        assert opt.fingerprint() == other.fingerprint() and opt.eval_counter == other.eval_counter


@pytest.mark.rows
@both
@pytest.mark.parametrize("double", [False, True])
def test_a_twin_finds_the_same_and_moves_nothing(parallelize: int, double: bool) -> None:
    case = mlp()
    with optimizer(parallelize, verbose=0) as opt:
        f, start = opt.evaluate(), opt.parameters.clone()
        with extending.twin(opt, loaded=True, double=double, parallelize=2 // parallelize) as twin:
            torch.testing.assert_close(twin.evaluate(), f)
            assert len(twin.workers) == 2 // parallelize
            assert twin.grad_parameters.dtype == (torch.float64 if double else opt.parameters.dtype)
            twin.parameters.zero_()
        assert torch.equal(opt.parameters, start)
        assert f.item() == pytest.approx(case.reference()[0])
        with pytest.raises(TypeError, match=r"a twin may differ in .*; got \['backend', 'devices'\]"):
            extending.twin(opt, backend="ray", devices=None)
        for bad in ({"parallelize": 0}, {"chunk_size": "auto"}, {"chunk_size": -1}, {"seed": -1}):
            with pytest.raises(ValueError, match=f"`{next(iter(bad))}`"):
                extending.twin(opt, **bad)


def test_scores_in_a_loop_of_ones_own_are_those_of_score() -> None:
    case = mlp()
    with optimizer() as opt:
        scoring = extending.scored(opt, Batches((case.inputs, case.targets), 10), {"mse": mse_loss})
        assert [len(outputs) for outputs, _, _ in scoring] == [batch.samples for batch in scoring]
        assert scoring.values == opt.score((case.inputs, case.targets), {"mse": mse_loss}) == scoring.values
        one = extending.scored(opt, (case.inputs, case.targets), mse_loss)
        next(iter(one))  # what was seen so far
        assert one.values == scoring.values["mse"] and extending.scored(opt, (case.inputs, case.targets)).values == {}
        matrix = extending.scored(
            opt, (case.inputs, case.targets), lambda outputs, targets: (outputs - targets).numpy()
        )
        for _ in matrix:
            pass
        assert matrix.values.shape == matrix.values.shape == case.targets.shape
        with pytest.raises(ValueError, match="yielded no batches"):
            _ = extending.scored(opt, [], mse_loss).values


def test_entries_of_ones_own_come_back_before_anything_changes(tmp_path: Path) -> None:
    with optimizer() as opt:
        opt.save(tmp_path / "file", extra={"mine": {"list": [1, "a"], "tensor": torch.ones(2)}})
        found: dict[str, Any] = {}
        opt.load_checkpoint(tmp_path / "file", take=found.update)
        assert found["mine"]["list"] == [1, "a"] and torch.equal(found["mine"]["tensor"], torch.ones(2))
        with torch.no_grad():
            opt.parameters.add_(1)
        before = opt.fingerprint()

        def refuse(extra: dict[str, Any]) -> None:
            raise ValueError("not mine")

        with pytest.raises(CheckpointError, match=r"cannot resume from checkpoint .*: not mine"):
            opt.load_checkpoint(tmp_path / "file", take=refuse)
        assert opt.fingerprint() == before
        with pytest.raises(ValueError, match=r"`extra` has \['module'\], which state_dict\(\) has"):
            opt.save(tmp_path / "other", extra={"module": 1})
        assert not (tmp_path / "other").exists()


def test_reports_change_when_verbose_is_assigned(capsys: pytest.CaptureFixture[str]) -> None:
    with optimizer(verbose=1) as opt:
        extending.report(opt, 0)
        opt.evaluate()
        assert capsys.readouterr().err.count("evaluations") == 0
        extending.report(opt, 1)
        opt.evaluate()
        assert extending.verbosity(opt) == 1 and "evaluations" in capsys.readouterr().err
        with pytest.raises(ValueError, match="`verbose` must be"):
            extending.report(opt, 4)


class Ramp:
    """Two batches an epoch, made of its number."""

    def __len__(self) -> int:
        return 2

    def read(self, epoch: int, start: int) -> Iterator[tuple[Any, bool]]:
        """Yields them from `start` on."""
        for index in range(start, 2):
            yield torch.full((3, 1), 10.0 * epoch + index), index == 1

    def rows(self, epoch: int, index: int) -> None:
        """They are no rows."""

    def done(self, index: int) -> float:
        """So much of an epoch."""
        return index / 2

    def identity(self) -> dict[str, int]:
        """Always the same."""
        return {"length": 2}


def test_a_source_of_ones_own_has_a_position() -> None:
    batches = Batches(source=Ramp())
    first = [batch[0, 0].item() for batch in batches]
    second = next(iter(batches))[0, 0].item()
    other = Batches(source=Ramp())
    other.load_state_dict(batches.state_dict())
    assert (first, second, [batch[0, 0].item() for batch in other]) == ([0.0, 1.0], 10.0, [11.0])
    assert other.epoch == 2 and isinstance(other.source, Ramp)
    with pytest.raises(ValueError, match=r"`batch_size` cannot be given for `source` \(Ramp\)"):
        Batches(source=Ramp(), batch_size=3)


def test_observers_are_objects_of_that_class() -> None:
    with optimizer() as opt, pytest.raises(TypeError, match=r"`observer` must be a batchopt\.Observer; got list"):
        extending.observe(opt, [])  # type: ignore[type-var]


def test_what_depends_on_the_cut_is_told() -> None:
    case = mlp()
    module, x = nn.Linear(3, 1), torch.randn(20, 3)
    root = BatchOptimizer(module, loss_fn=lambda net, x, y: net(x).square().mean().sqrt(), check_cut=False)
    with root as opt, optimizer() as fine:
        opt.load(x)
        (found,) = extending.cut_differences(opt, 20)
        assert (
            found.decided
            and found.whole != pytest.approx(found.parted)
            and extending.cut_differences(fine, len(case.inputs)) == []
        )
