"""A run that is killed anywhere, and resumed with other workers, has the bits of one that was not."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import batchopt
from batchopt import Batches, BatchOptimizer, CheckpointError
from batchopt.ignite import Checkpoint, EarlyStopping, EverySeconds, Moment, Record, fit
from tests.ignite.common import Killed, batches, data, optimizer
from tests.ignite.test_record import timeless

ROOT = Path(__file__).parents[2]


class Noisy(Dataset[Any]):
    """Samples that draw from three generators each time that they are read."""

    def __init__(self) -> None:
        self._x, self._y = data()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(()).item() + np.random.rand() + random.random()
        return self._x[index] + noise, self._y[index]


def loader(workers: int, noisy: bool = True) -> DataLoader[Any]:
    """Five batches, shuffled."""
    dataset: Any = Noisy() if noisy else TensorDataset(*data())
    return DataLoader(dataset, 10, shuffle=True, num_workers=workers)


def with_generators() -> DataLoader[Any]:
    """A loader that was given generators of its own."""
    own = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    dataset = TensorDataset(*data())
    return DataLoader(dataset, 10, sampler=RandomSampler(dataset, generator=own[0]), generator=own[1])


DATA: dict[str, Callable[[], Any]] = {
    "tensors": batches,
    "dataset": lambda: Batches(Noisy(), 10, shuffle=True, seed=3),
    "collated": lambda: Batches(list(zip(*data(), strict=True)), 10, shuffle=True, seed=3),
    "loader without workers": lambda: loader(0),
    "loader with generators": with_generators,
}


def run(
    folder: Path,
    make: Callable[[], Any] = batches,
    parallelize: int = 1,
    killed: int | None = None,
    **options: Any,
) -> tuple[str, Any]:
    """Train for two epochs of five batches; the fingerprint and the numbers of the last epoch."""

    def kill(moment: Moment) -> None:
        if moment.iteration == killed:
            raise Killed

    checkpoint = options.pop("checkpoint", None) or Checkpoint(folder, every=1)
    given = {"backend": options.pop("backend")} if "backend" in options else {}
    with optimizer(parallelize, **given) as opt:
        state = fit(opt, make(), **{"epochs": 2, **options}, checkpoint=checkpoint, resume="auto", on_batch=kill)
        return opt.fingerprint(), dict(state.metrics)


@pytest.mark.sampled
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("every", [1, 2, None])
def test_killed_at_every_batch(name: str, every: int | None, tmp_path: Path) -> None:
    validation: dict[str, Any] = {"eval_data": data(), "metrics": {"loss": mse_loss}}

    def trained(folder: Path, killed: int | None = None) -> tuple[str, Any]:
        return run(folder, DATA[name], killed=killed, checkpoint=Checkpoint(folder, every=every), **validation)

    expected = trained(tmp_path / "whole")
    for killed in range(1, 11):
        folder = tmp_path / str(killed)
        with pytest.raises(Killed):
            trained(folder, killed)
        assert trained(folder) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("positions", [(1, 3, 5, 6, 8, 10), pytest.param((2, 4, 7, 9), marks=pytest.mark.slow)])
def test_a_loader_with_workers(noisy: bool, positions: tuple[int, ...], tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", lambda: loader(2, noisy))
    if not noisy:  # the number of its workers is nothing to the order
        assert run(tmp_path / "other", lambda: loader(0, noisy)) == expected
    for killed in positions:
        folder = tmp_path / str(killed)
        with pytest.raises(Killed):
            run(folder, lambda: loader(2, noisy), killed=killed)
        resumed = (lambda: loader(0, noisy)) if not noisy and killed % 2 else (lambda: loader(2, noisy))
        assert run(folder, resumed) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tensors", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dataset", "loader without workers"))]
)
def test_one_worker_then_three_then_two(name: str, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", DATA[name])
    for first, second in itertools.combinations(range(2, 11, 3), 2):
        folder = tmp_path / f"{first} {second}"
        for parallelize, killed in ((1, first), (3, second)):
            with pytest.raises(Killed):
                run(folder, DATA[name], parallelize, killed)
        assert run(folder, DATA[name], 2) == expected


def test_killed_in_the_first_batch_of_all_or_before_the_first_checkpoint(tmp_path: Path) -> None:
    expected = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "a", killed=1)
    assert Checkpoint(tmp_path / "a").newest() is None
    assert run(tmp_path / "a") == expected


def test_svrg_early_stopping_and_the_mean_of_an_epoch(tmp_path: Path) -> None:
    def trained(folder: str, killed: int | None = None) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1).double()
        seen: list[Any] = []

        def kill(moment: Moment) -> None:
            if moment.iteration == killed:
                raise Killed

        with BatchOptimizer(
            module, mse_loss, optimizer=lambda p: batchopt.SVRG(torch.optim.SGD(p, lr=0.01)), chunk_size=4
        ) as opt:
            fit(
                opt,
                batches(),
                epochs=6,
                patience=EarlyStopping("loss", 2, mode="max"),
                checkpoint=Checkpoint(tmp_path / folder, every=1),
                resume="auto",
                on_batch=kill,
                on_epoch=lambda moment: seen.append((moment.epoch, moment.numbers["loss"])),
            )
            return opt.fingerprint(), seen

    expected, epochs = trained("whole")
    last = epochs[-1][0]
    assert last < 6  # it was stopped
    for killed in range(1, last * 5 + 1, 2):
        with pytest.raises(Killed):
            trained(str(killed), killed)
        fingerprint, seen = trained(str(killed))
        assert fingerprint == expected and seen == epochs[len(epochs) - len(seen) :]
    assert trained("whole") == (expected, [])  # what was stopped stays so


def test_more_epochs_and_done_epochs(tmp_path: Path) -> None:
    run(tmp_path / "run")
    fingerprint, numbers = run(tmp_path / "run", epochs=1)
    assert numbers["loss"] > 0 and fingerprint == run(tmp_path / "run")[0]
    assert run(tmp_path / "run", epochs=3) == run(tmp_path / "other", epochs=3)


@pytest.mark.slow
def test_a_process_that_is_killed_by_the_system(tmp_path: Path) -> None:
    def started(parallelize: int, pause: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.ignite.program", str(tmp_path), str(parallelize), str(pause)]
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
    found, _ = (process := started(3, 0.0)).communicate(timeout=60)
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
    assert (state["batches"]["epoch"], state["engine"]["iteration"]) == (1, 5)
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


def lowered(opt: BatchOptimizer) -> Any:
    """A scheduler in another one, whose milestones are a Counter."""
    schedulers = torch.optim.lr_scheduler
    assert opt.optimizer is not None
    parts = [schedulers.ConstantLR(opt.optimizer, 0.5), schedulers.MultiStepLR(opt.optimizer, [1, 3, 3])]
    return schedulers.SequentialLR(opt.optimizer, parts, milestones=[2])


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # by torch 2.6 itself
def test_schedulers_in_a_scheduler_go_on_and_others_are_refused(tmp_path: Path) -> None:
    def trained(folder: str, make: Any = lowered, killed: int | None = None, step: str = "batch") -> str:
        def kill(moment: Moment) -> None:
            if moment.iteration == killed:
                raise Killed

        with optimizer() as opt:
            options: dict[str, Any] = {"checkpoint": Checkpoint(tmp_path / folder, every=1), "resume": "auto"}
            scheduler = make(opt)
            fit(opt, batches(), epochs=2, scheduler=scheduler, scheduler_step=step, on_batch=kill, **options)
            return opt.fingerprint()

    whole = trained("whole")
    for killed in (2, 4, 7):
        with pytest.raises(Killed):
            trained(str(killed), killed=killed)
        if killed == 4:
            with pytest.raises(CheckpointError, match="`scheduler` SequentialLR, and here is StepLR"):
                trained("4", lambda opt: torch.optim.lr_scheduler.StepLR(opt.optimizer, 2))
            with pytest.raises(CheckpointError, match="`scheduler_step` batch, and here is epoch"):
                trained("4", step="epoch")
        assert trained(str(killed)) == whole


@pytest.mark.parametrize("killed", [None, 3])
def test_a_callback_that_iterates_over_the_loader_changes_no_order(killed: int | None, tmp_path: Path) -> None:
    def trained(folder: str, looks: bool, killed: int | None = None, own: bool = True) -> str:
        dataset = TensorDataset(*data())
        generator = torch.Generator() if own else None
        loader = DataLoader(dataset, 10, sampler=RandomSampler(dataset, True, 50, generator=generator))

        def look(moment: Moment) -> None:
            if looks:
                assert len(list(loader)) == 5
            if moment.iteration == killed:
                raise Killed

        with optimizer() as opt:
            checkpoint = Checkpoint(tmp_path / folder, every=1)
            fit(opt, loader, epochs=2, on_batch=look, checkpoint=checkpoint, resume="auto")
            return opt.fingerprint()

    for own in (True, False):
        expected = trained(f"plain {own}", False, own=own)
        if killed is not None:
            with pytest.raises(Killed):
                trained(f"looks {own}", True, killed, own)
        assert trained(f"looks {own}", True, own=own) == expected


def test_triggers_with_a_state_go_on(tmp_path: Path) -> None:
    now = [0.0]

    def tick(moment: Moment) -> None:
        now[0] += 1.0
        if moment.iteration == 5 and not killed:
            killed.append(True)
            raise Killed

    def trained() -> list[int]:
        checkpoint = Checkpoint(tmp_path / "run", every=EverySeconds(2, lambda: now[0]), keep=20)
        with optimizer() as opt:
            fit(opt, batches(), epochs=2, checkpoint=checkpoint, resume="auto", on_batch=tick)
        return [one.iteration for one in checkpoint.files()]

    killed: list[bool] = []
    with pytest.raises(Killed):
        trained()
    assert trained()[-1] == 10


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
