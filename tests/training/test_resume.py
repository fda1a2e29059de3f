"""A run that is killed anywhere, and resumed with other workers, has the bits of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

import batchopt
from batchopt import Batches, CheckpointError
from batchopt.training import Checkpoint, EarlyStopping, EveryEpoch, EverySeconds, Moment, Record, fit
from tests.training.common import Killed, batches, data, optimizer
from tests.training.test_record import timeless

ROOT = Path(__file__).parents[2]


class Noisy(Dataset[Any]):
    """Samples that draw random numbers each time that they are read, in the workers."""

    def __init__(self) -> None:
        self._x, self._y = data()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index] + torch.rand(()).item(), self._y[index]


DATA: dict[str, Callable[[], Any]] = {
    "tensors": batches,
    "dataset": lambda: Batches(Noisy(), 10, shuffle=True, seed=3),
    "collated": lambda: Batches(list(zip(*data(), strict=True)), 10, shuffle=True, seed=3),
}


def run(
    folder: Path,
    make: Callable[[], Any] = batches,
    parallelize: int = 1,
    killed: int | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    **options: Any,
) -> tuple[str, Any]:
    """Train for two epochs of five batches; the fingerprint and the numbers of the last epoch."""

    def kill(moment: Moment) -> None:
        if moment.iteration == killed:
            raise Killed

    checkpoint = options.pop("checkpoint", None) or Checkpoint(folder, every=1)
    given = {name: options.pop(name) for name in ("backend", "optimizer") if name in options}
    with optimizer(parallelize, **given) as opt:
        if scheduler is not None:
            options["scheduler"] = scheduler(opt.optimizer)
        options.setdefault("on_batch", kill)
        state = fit(opt, make(), **{"epochs": 2, **options}, checkpoint=checkpoint, resume="auto")
        return opt.fingerprint(), {**state.metrics, "epoch": state.epoch}


def check(trained: Callable[[str, int | None], Any], positions: Iterable[int] = range(1, 11)) -> Any:
    """Killed there and gone on with it is as without; returns that."""
    expected = trained("whole", None)
    for killed in positions:
        with pytest.raises(Killed):
            trained(str(killed), killed)
        assert trained(str(killed), None) == expected, killed
    return expected


@pytest.mark.rows
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("every", [1, *(pytest.param(often, marks=pytest.mark.nightly) for often in (2, None))])
def test_killed_at_every_batch(name: str, every: int | None, tmp_path: Path) -> None:
    validation: dict[str, Any] = {"eval_data": data(), "metrics": {"loss": mse_loss}}

    def trained(folder: str, killed: int | None) -> tuple[str, Any]:
        checkpoint = Checkpoint(tmp_path / folder, every=every)
        return run(tmp_path / folder, DATA[name], killed=killed, checkpoint=checkpoint, **validation)

    check(trained)


schedulers = torch.optim.lr_scheduler
SCHEDULERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one in another, whose milestones are a Counter": (
        lambda adam: schedulers.SequentialLR(
            adam,
            [schedulers.ConstantLR(adam, 0.5), schedulers.MultiStepLR(adam, [1, 3, 3])],
            milestones=[2],
        ),
        "batch",
    ),
    "torch, epoch": (lambda adam: schedulers.StepLR(adam, 1, 0.1), "epoch"),
    "torch, batch": (lambda adam: schedulers.MultiStepLR(adam, [2, 7], 0.1), "batch"),
    "a plateau": (lambda adam: schedulers.ReduceLROnPlateau(adam, factor=0.5, patience=0, threshold=1.0), "epoch"),
}


@pytest.mark.rows
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # by torch 2.6 itself
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_go_on_and_others_are_refused(name: str, tmp_path: Path) -> None:
    scheduler, step = SCHEDULERS[name]

    def trained(folder: str, killed: int | None, **options: Any) -> Any:
        given = {"scheduler": scheduler, "scheduler_step": step, **options}
        return run(tmp_path / folder, killed=killed, **given)

    check(trained)
    other, there = ("epoch", "batch") if step == "batch" else ("batch", "epoch")
    for options, words in (
        ({"scheduler": lambda adam: schedulers.LinearLR(adam)}, "`scheduler` .*, and here is LinearLR"),
        ({"scheduler_step": other}, f"`scheduler_step` {there}, and here is {other}"),
        ({"scheduler": None}, "`scheduler` .*, and here is None"),
    ):
        with pytest.raises(CheckpointError, match=words):
            trained("whole", None, epochs=3, **options)


def test_svrg_early_stopping_and_the_mean_of_an_epoch(tmp_path: Path) -> None:
    def trained(folder: str, killed: int | None) -> Any:
        options: dict[str, Any] = {"epochs": 6, "patience": EarlyStopping("loss", 2, mode="max")}
        options["optimizer"] = lambda params: batchopt.SVRG(torch.optim.SGD(params, lr=0.01))
        return run(tmp_path / folder, killed=killed, **options)

    expected = check(trained, range(1, 14, 2))
    assert expected[1]["epoch"] < 6  # it was stopped, and stays so
    assert trained("whole", None) == expected


@pytest.mark.slow
def test_a_process_that_is_killed_by_the_system(tmp_path: Path) -> None:
    def started(parallelize: int, pause: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.training.program", str(tmp_path), str(parallelize), str(pause)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "workers"), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
        )

    with optimizer() as opt:
        fit(opt, batches(), epochs=4, log=tmp_path / "whole.jsonl")
        expected = opt.fingerprint()
    process = started(2, 0.05)
    until = time.monotonic() + 60
    while Checkpoint(tmp_path / "run").newest() is None:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.12)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    found, _ = (process := started(3, 0.0)).communicate(timeout=280)
    assert (process.returncode, found) == (0, expected + "\n")
    whole, killed = (timeless(Record(tmp_path / name).lines()) for name in ("whole.jsonl", "log.jsonl"))
    assert whole == killed and len(whole) == 4


# The files


@pytest.mark.slow
def test_files_are_plain_and_an_optimizer_loads_them(tmp_path: Path) -> None:
    with optimizer() as opt:
        fit(opt, batches(), epochs=1, checkpoint=tmp_path / "run", log=tmp_path / "log.jsonl")
        expected = opt.fingerprint()
    path = Checkpoint(tmp_path / "run").newest()
    assert path is not None and path.name == "00000005.batchopt"
    content = torch.load(path, weights_only=True)
    state = content["state"]["fit"]
    assert (state["batches"]["epoch"], state["batches"]["iteration"]) == (1, 5)
    assert state["logs"] == [{"position": (tmp_path / "log.jsonl").stat().st_size}]
    with optimizer(2) as opt:
        opt.load_checkpoint(path)
        assert opt.fingerprint() == expected


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    values = iter([3.0, 1.0, 2.0, float("nan"), 5.0, 1.0])
    checkpoint = Checkpoint(tmp_path / "run", keep=2, best=2, score="eval_loss")
    options: dict[str, Any] = {"eval_data": data(), "metrics": {"loss": lambda outputs, targets: next(values)}}
    with optimizer() as opt:
        fit(opt, batches(), epochs=6, checkpoint=checkpoint, **options)
    names = [one.path.name for one in checkpoint.files()]
    assert names == ["00000010,score=1.0.batchopt", "00000025,score=5.0.batchopt", "00000030,score=1.0.batchopt"]
    assert checkpoint.best() == checkpoint.files()[0].path and checkpoint.newest() == checkpoint.files()[-1].path
    values = iter([0.1, 0.3, 0.2])
    checkpoint = Checkpoint(tmp_path / "max", best=1, mode="max", every=2)
    with optimizer() as opt:
        fit(opt, batches(), epochs=3, checkpoint=checkpoint, **options)
    assert [one.path.name for one in checkpoint.files()] == [
        "00000010,score=0.3.batchopt",
        "00000015,score=0.2.batchopt",
    ]
    with optimizer() as opt:
        fit(opt, batches(), epochs=4, checkpoint=tmp_path / "keep", keep=3)
    assert [one.iteration for one in Checkpoint(tmp_path / "keep").files()] == [10, 15, 20]


def test_going_on_from_a_file_by_name(tmp_path: Path) -> None:
    expected = run(tmp_path / "run", checkpoint=Checkpoint(tmp_path / "run", every=1, keep=10))
    files = Checkpoint(tmp_path / "run").files()
    assert [one.iteration for one in files] == list(range(1, 11))
    with optimizer() as opt:
        fit(opt, batches(), epochs=2, checkpoint=tmp_path / "other", resume=files[3].path)
        assert opt.fingerprint() == expected[0]
    with optimizer() as opt, pytest.raises(ValueError, match=r"has checkpoints after '00000004.batchopt'"):
        fit(opt, batches(), epochs=2, checkpoint=tmp_path / "run", resume=files[3].path)
    with optimizer() as opt, pytest.raises(ValueError, match="has checkpoints, up to iteration 10: resume from there"):
        fit(opt, batches(), epochs=2, checkpoint=tmp_path / "run")
    with optimizer() as opt, pytest.raises(CheckpointError, match="No such file"):
        fit(opt, batches(), epochs=2, checkpoint=tmp_path / "new", resume=tmp_path / "nothing")


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "run")
    path = Checkpoint(tmp_path / "run").newest()
    assert path is not None
    given: dict[str, Any] = {"epochs": 3, "checkpoint": tmp_path / "run", "resume": "auto"}
    other = Batches(data(), 10, shuffle=True, seed=4)
    with optimizer() as opt, pytest.raises(CheckpointError, match="`seed` was 3 where this state was saved, and is 4"):
        fit(opt, other, **given)
    position = batches()
    with optimizer(optimizer="sgd") as opt:
        before = opt.fingerprint()
        with pytest.raises(CheckpointError, match=r"optimizer of the state is torch.Adam and this one is torch.SGD"):
            fit(opt, position, **given)
        assert opt.fingerprint() == before and position.iteration == 0
    with optimizer() as opt:
        opt.save(tmp_path / "alone")
        with pytest.raises(CheckpointError, match="was not written by fit"):
            fit(opt, batches(), epochs=1, checkpoint=tmp_path / "new", resume=tmp_path / "alone")
    path.write_bytes(path.read_bytes()[:-100])
    with optimizer() as opt, pytest.raises(CheckpointError, match="damaged"):
        fit(opt, batches(), **given)


def loader() -> DataLoader[Any]:
    """Five batches, in the order of the data."""
    return DataLoader(TensorDataset(*data()), 10)


def test_a_loader_goes_on_at_the_ends_of_epochs(tmp_path: Path) -> None:
    def trained(folder: str, killed: int | None) -> tuple[str, Any]:
        return run(tmp_path / folder, loader, killed=killed, checkpoint=Checkpoint(tmp_path / folder))

    check(trained, (4, 5, 8))
    assert [one.iteration for one in Checkpoint(tmp_path / "8").files()] == [10]


def test_a_loader_is_not_saved_within_an_epoch(tmp_path: Path) -> None:
    every: Any
    for every in (3, EveryEpoch(0.5), EveryEpoch(1, batches()), EverySeconds(1)):
        with pytest.raises(
            ValueError, match=r"at ends of epochs alone: .* Batches\(dataset, batch_size, shuffle=True\)"
        ):
            run(tmp_path, loader, checkpoint=Checkpoint(tmp_path, every=every))
    checkpoint = Checkpoint(tmp_path, every=EveryEpoch(2))
    with optimizer() as opt, pytest.warns(UserWarning, match=r"within an epoch of a loader, .* is not saved there"):
        fit(opt, loader(), epochs=4, checkpoint=checkpoint, on_batch=lambda moment: moment.iteration == 13)
    assert [one.iteration for one in checkpoint.files()] == [10]
    lbfgs = optimizer(optimizer=lambda params: batchopt.LBFGS(params, max_iter=50))
    with lbfgs as opt, pytest.warns(UserWarning, match="within an epoch"):  # of which the first step is not whole
        fit(opt, loader(), epochs=4, checkpoint=tmp_path / "lbfgs", time_limit=1e-9)
        assert opt.paused and not (tmp_path / "lbfgs").exists()


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Checkpoint("c", keep=0), ValueError, "`keep` must be >= 1, got 0"),
        (lambda: Checkpoint("c", best=-1), ValueError, "`best` must be >= 0, got -1"),
        (lambda: Checkpoint("c", mode="most"), ValueError, "`mode` must be 'min' or 'max'"),
        (lambda: Checkpoint("c", every="epoch"), TypeError, "`every` must be a number of iterations"),
    ],
)
def test_wrong_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
