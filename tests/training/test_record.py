"""The record of a training, TensorBoard, functions that log, and the monitor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import batchopt
from batchopt.training import Checkpoint, EveryEpoch, Moment, Monitor, Record, fit, log_steps
from tests.training.common import Killed, batches, data, optimizer
from tests.workloads import misfit


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "elapsed_time"} for line in lines]


def test_a_line_an_epoch_which_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    record = Record(tmp_path / "log.jsonl")
    seen: list[int] = []
    losses: list[float] = []

    def on_epoch(moment: Moment) -> None:
        seen.append(len(Record(record.path).lines()))

    with optimizer() as opt:
        fit(
            opt,
            batches(),
            epochs=3,
            eval_data=data(),
            metrics={"loss": mse_loss},
            log=record,
            on_epoch=on_epoch,
            on_batch=lambda moment: losses.append(moment.output),
        )
    assert seen == [1, 2, 3]
    lines = record.lines()
    assert [set(line) for line in lines] == [{"epoch", "iteration", "elapsed_time", "lr", "loss", "eval_loss"}] * 3
    assert [(line["epoch"], line["iteration"], line["lr"]) for line in lines] == [
        (1, 5, 1e-3),
        (2, 10, 1e-3),
        (3, 15, 1e-3),
    ]
    assert [line["loss"] for line in lines] == pytest.approx([sum(losses[i : i + 5]) / 5 for i in (0, 5, 10)])
    assert lines[0]["elapsed_time"] < lines[2]["elapsed_time"]
    table = record.table(["epoch", "eval_loss", "nothing"]).splitlines()
    assert len(table) == 4 and table[0].split() == ["epoch", "eval_loss", "nothing"]
    assert table[1].split() == ["1", f"{lines[0]['eval_loss']:.6g}"]
    record.plot(tmp_path / "log.png")
    assert (tmp_path / "log.png").stat().st_size > 1000
    assert len(record.plot(keys=["loss"]).axes[0].lines) == 1


def test_a_line_half_an_epoch_and_chosen_numbers(tmp_path: Path) -> None:
    record = Record(tmp_path / "log.jsonl", every=EveryEpoch(0.5), keys=["loss", "eval_loss"])
    losses: list[float] = []
    with optimizer() as opt:
        fit(
            opt,
            batches(),
            epochs=2,
            eval_data=data(),
            metrics={"loss": mse_loss},
            log=record,
            on_batch=lambda moment: losses.append(moment.output),
        )
    lines = record.lines()
    assert [line["epoch"] for line in lines] == [0.6, 1, 1.6, 2]
    assert ["eval_loss" in line for line in lines] == [False, True, False, True] and "lr" not in lines[0]
    means = [sum(losses[i:j]) / (j - i) for i, j in ((0, 3), (3, 5), (5, 8), (8, 10))]
    assert [line["loss"] for line in lines] == pytest.approx(means)


@pytest.mark.parametrize("killed", [1, 4, 9])
def test_a_killed_run_goes_on_without_double_lines(killed: int, tmp_path: Path) -> None:
    def run(log: str, on_batch: Any = ()) -> list[dict[str, Any]]:
        record = Record(tmp_path / log, every=2)
        checkpoint = Checkpoint(tmp_path / f"{log}.run", every=3)
        with optimizer() as opt:
            fit(opt, batches(), epochs=2, log=record, checkpoint=checkpoint, resume="auto", on_batch=on_batch)
        return timeless(record.lines())

    def kill(moment: Moment) -> None:
        if moment.iteration == killed:
            raise Killed

    whole = run("whole")
    assert [line["iteration"] for line in whole] == [2, 4, 6, 8, 10]
    with pytest.raises(Killed):
        run("killed", kill)
    with (tmp_path / "killed").open("a") as file:
        file.write('{"half a li')
    assert run("killed") == whole


# TensorBoard


def test_without_tensorboard_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with optimizer() as opt, pytest.raises(ImportError, match=r"pip install 'batchopt\[tensorboard\]'"):
        fit(opt, batches(), epochs=1, log="runs/")
    with optimizer() as opt, pytest.raises(TypeError, match="`log` must be a file"):
        fit(opt, batches(), epochs=1, log=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboards_own_reader_finds_each_number_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def kill(moment: Moment) -> None:
        if moment.iteration == 8:
            raise Killed

    losses: dict[int, float] = {}

    def note(moment: Moment) -> None:
        losses[moment.iteration] = moment.output

    given: dict[str, Any] = {
        "epochs": 2,
        "eval_data": data(),
        "metrics": {"loss": mse_loss},
        "log": [f"{tmp_path}/runs/", tmp_path / "log.jsonl"],
        "checkpoint": tmp_path / "run",
        "resume": "auto",
    }
    with optimizer() as opt, pytest.raises(Killed):
        fit(opt, batches(), **given, on_batch=[note, kill])
    with optimizer() as opt:
        fit(opt, batches(), **given, on_batch=note)
    read = EventAccumulator(f"{tmp_path}/runs/").Reload()
    assert {"batch/loss", "loss", "eval_loss", "lr"} <= set(read.Tags()["scalars"])
    found = [(event.step, event.value) for event in read.Scalars("batch/loss")]
    assert found == [(i, pytest.approx(losses[i])) for i in range(1, 11)]
    lines = Record(tmp_path / "log.jsonl").lines()
    assert [(event.step, event.value) for event in read.Scalars("eval_loss")] == [
        (line["iteration"], pytest.approx(line["eval_loss"])) for line in lines
    ]


# Functions


class Kept:
    """A log that keeps its lines: pairs of the number of an iteration, and numbers by name."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def __call__(self, numbers: Mapping[str, float], iteration: int) -> None:
        self.lines.append((iteration, dict(numbers)))


def test_a_function_gets_what_a_record_gets(tmp_path: Path) -> None:
    kept = Kept()
    with optimizer() as opt:
        fit(opt, batches(), epochs=2, log=[kept, tmp_path / "log.jsonl"])
        with pytest.raises(ValueError, match="twice"):
            fit(opt, batches(), epochs=2, log=[kept, kept])
        with pytest.raises(TypeError, match=r"`log` must be callable as log\(numbers, iteration\)"):
            fit(opt, batches(), epochs=2, log=lambda numbers: None)
    written = Record(tmp_path / "log.jsonl").lines()
    assert timeless([numbers for _, numbers in kept.lines]) == timeless(written)
    assert [iteration for iteration, _ in kept.lines] == [5, 10]


def test_a_loop_passes_on_accepted_points_and_steps_of_other_optimizers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"terms": {"fit": batchopt.Term(misfit), "more": batchopt.Term(misfit, 0.1)}}
    batch = {"fit": data(), "more": data()}
    logger, other = Kept(), Kept()

    def made(optimizer: str) -> batchopt.BatchOptimizer:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        return batchopt.BatchOptimizer(module, optimizer=optimizer, history=True, **given)

    with made("lbfgs") as opt, log_steps(opt, logger), log_steps(opt, other, every=5):
        opt.step(batch)
        opt.save(tmp_path / "half")
    with made("lbfgs") as opt:
        opt.load_checkpoint(tmp_path / "half")
        with log_steps(opt, logger):
            opt.step(batch)
        rows = opt.history.rows
    assert [number for number, _ in logger.lines] == [row["iteration"] for row in rows] == [*range(1, len(rows) + 1)]
    assert [number for number, _ in other.lines] == [*range(5, other.lines[-1][0] + 1, 5)]
    for (_, line), row in zip(logger.lines, rows, strict=True):
        assert line["loss"] == row["f"] and line["lr"] == 1.0
        assert all(line[name] == row[name] for name in ("step", "evaluations", "gradient", "change", "length"))
        assert line["loss"] == pytest.approx(line["loss/fit"] + 0.1 * line["loss/more"])
    with made("adam") as opt, log_steps(opt, adam := Kept()):
        losses = [opt.step(batch) for _ in range(3)]
        with pytest.raises(ValueError, match="lacks"):
            opt.step({"fit": data()})
    assert [(number, line["loss"]) for number, line in adam.lines] == [(i + 1, losses[i]) for i in range(3)]
    with made("adam") as opt, pytest.raises(TypeError, match="`log` must be callable"), log_steps(opt, "runs"):  # type: ignore[arg-type]
        opt.step(batch)


# The monitor


@pytest.mark.parametrize("parallelize", [1, 2])
def test_parameters_gradients_and_outputs_of_layers(parallelize: int, tmp_path: Path) -> None:
    monitor = Monitor(every=5)
    x, y = data()
    with optimizer(parallelize) as opt:
        fit(opt, batches(), epochs=2, log=tmp_path / "log.jsonl")
        expected = opt.fingerprint()
    with optimizer(parallelize) as opt:
        fit(opt, batches(), epochs=2, monitor=monitor, log=tmp_path / "log.jsonl")
        assert opt.fingerprint() == expected
        names = [f"{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
        expected_names = {*names, *(f"{name}.grad" for name in names), "0.output", "1.output", "2.output"}
        assert set(monitor.values) == expected_names
        weight = opt.module.get_parameter("0.weight")
        assert weight.grad is not None
        assert monitor.values["0.weight"] == pytest.approx(weight.square().mean().sqrt().item())
        assert monitor.values["0.weight.grad"] == pytest.approx(weight.grad.square().mean().sqrt().item())
        last = Monitor("0.output", statistic=torch.mean)
        opt.load(x, y)
        assert last.look(opt) == {"0.output": pytest.approx(opt.module.get_submodule("0")(x).mean().item())}
    lines = Record(tmp_path / "log.jsonl").lines()
    assert expected_names < set(lines[0])
