"""`scaling()`: its table, and that it leaves no trace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from batchopt import BatchOptimizer
from batchopt.extras.scaling import Scaling, ScalingRow
from tests.test_auto import Slow
from tests.workloads import mlp

SCRIPT = """
import torch, batchopt

def make():
    opt = batchopt.BatchOptimizer(torch.nn.Linear(3, 1), torch.nn.MSELoss(), optimizer=None)
    opt.load(torch.randn(64, 3), torch.randn(64, 1))
    return opt

not_one = 3
"""


def rows(*seconds: float) -> tuple[ScalingRow, ...]:
    """This process with two threads and with one, and two workers."""
    (two, one, workers) = seconds
    return (ScalingRow(1, 2, two), ScalingRow(1, 1, one), ScalingRow(2, 1, workers, memory=74_000_000))


def test_speed_ups_are_of_the_best_this_process_can_and_efficiencies_of_one_thread() -> None:
    found = Scaling(rows(0.08, 0.1, 0.05))
    assert found.speed_up(found.rows[2]) == pytest.approx(1.6) and found.efficiency(found.rows[2]) == pytest.approx(1)
    assert found.summary == "2 workers are 1.6 times as fast as this process."
    assert "74" in str(found) and "2 workers, 1 thread" in str(found)
    assert Scaling(rows(0.01, 0.02, 0.05)).summary == "No number of workers is faster than this process."


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_it_measures_what_there_is_and_leaves_no_trace(chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchopt.extras.scaling.usable_cores", lambda: 2)
    case = mlp()
    with BatchOptimizer(Slow(), nn.MSELoss(), optimizer=None, parallelize="auto", chunk_size=chunk_size) as opt:
        opt.load(case.inputs, case.targets)
        before, state = opt.evaluate(), opt.fingerprint()
        found = opt.scaling(seconds=0.5)
        assert opt.fingerprint() == state and len(opt.workers) == 1
        opt.load(case.inputs, case.targets)
        torch.testing.assert_close(opt.evaluate(), before)
    assert [row.workers for row in found.rows] == ([1, 1, 2] if chunk_size is None else [1, 2])
    assert 1.4 < found.speed_up(found.best) < 2.6  # a sample takes three milliseconds, wherever
    memory = found.best.memory
    assert memory is not None and memory > 1_000_000


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize("examine", ["scaling", "check"])
def test_running_statistics_are_as_before(examine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchopt.extras.scaling.usable_cores", lambda: 1)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x, y = torch.randn(24, 3), torch.randn(24, 1)
    with BatchOptimizer(module, nn.MSELoss(), optimizer="sgd") as opt:
        opt.step(x, y)
        opt.load(x, y)
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        opt.scaling(seconds=0.1) if examine == "scaling" else opt.check(x, y)
        torch.testing.assert_close(dict(module.named_buffers()), before, rtol=0, atol=0)


def test_it_is_of_this_machine() -> None:
    with BatchOptimizer(nn.Linear(2, 1), nn.MSELoss(), devices=["cpu", "cpu"]) as opt:
        opt.load(torch.randn(8, 2), torch.randn(8, 1))
        with pytest.raises(ValueError, match="the cores of this machine"):
            opt.scaling()


@pytest.mark.slow
@pytest.mark.rows
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["train.py:make", "--seconds", "0.2"], 0, "per second"),
        (["train.py:not_one"], 2, "has no function 'not_one'"),
        (["train.py"], 2, "give SCRIPT:FUNCTION"),
        (["tran.py:make"], 2, "there is no file 'tran.py'"),
        (["notes.txt:make"], 2, "'notes.txt' is not a Python script: invalid syntax"),
        (["train.py:make", "--seconds", "0"], 1, "`seconds` must be a positive number of seconds, got 0.0"),
    ],
)
def test_from_the_shell(tmp_path: Path, arguments: list[str], status: int, words: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "notes.txt").write_text("not a script")
    command = [sys.executable, "-m", "batchopt", "scaling", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status and words in done.stdout + done.stderr, done.stderr


@pytest.mark.slow
def test_a_report_of_a_problem() -> None:
    done = subprocess.run([sys.executable, "-m", "batchopt"], capture_output=True, text=True, check=True)
    assert f"torch {torch.__version__}" in done.stdout and re.search(r"cores +\d+ of \d+, \d+ threads", done.stdout)
