"""What is said at each level of `verbose`, and where."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

from batchopt import BatchOptimizer
from batchopt._function.observer import Evaluated
from batchopt._function.reporter import Reporter, logger
from batchopt._mapreduce.answers import Answer

ANSWERS = [Answer(0, 100, 0.25, []), Answer(2, 50, 0.5, [])]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a report sets up for good, and end the thread that tqdm starts with its first bar."""
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers.copy()
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers
    if tqdm.monitor is not None:
        tqdm.monitor.exit()


def evaluate_twice(verbose: int) -> None:
    report = Reporter(verbose)
    for number in (1, 2):
        report.evaluated(Evaluated(number, 1, 1 / 3, {}, ANSWERS, [0, 1], 0.0, 0.01, 0.0123))
    report.note("calibrated: %s", "fast")
    report.close()
    report.close()


EVALUATION = "evaluation {}, batch 1: loss 0.333333333, 12.300 ms"
SHARES = ["  worker 0: 100 samples, 250.000 ms", "  worker 2: 50 samples, 500.000 ms"]
RECORDS = {
    0: [],
    1: [],
    2: [EVALUATION.format(1), EVALUATION.format(2), "calibrated: fast"],
    3: [EVALUATION.format(1), *SHARES, EVALUATION.format(2), *SHARES, "calibrated: fast"],
}


@pytest.mark.parametrize("verbose", RECORDS)
def test_evaluations_are_a_bar_at_one_and_records_above_with_the_shares_of_workers_at_three(
    verbose: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    evaluate_twice(verbose)
    assert [record.message for record in caplog.records] == RECORDS[verbose]
    assert {(record.name, record.levelname) for record in caplog.records} <= {("batchopt", "INFO")}
    shown = capsys.readouterr()
    assert shown.out == "" and logger.handlers == []
    if verbose == 1:
        assert "batchopt: 2 evaluations" in shown.err and "batch 1, loss 0.333333" in shown.err
        assert shown.err.endswith("\n")
    else:
        assert shown.err == ""


@pytest.mark.parametrize("verbose", [2, 3])
def test_without_logging_set_up_records_go_to_stderr_once(verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    logger.propagate = False  # as if no handler were set up above
    Reporter(verbose)
    evaluate_twice(verbose)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines().count("batchopt: evaluation 1, batch 1: loss 0.333333333, 12.300 ms") == 1


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_the_cut_matters_to_batch_norm_in_training_mode_and_that_is_said_once_there_is_a_cut(kind: Any) -> None:
    report, module = Reporter(0), nn.Sequential(nn.Linear(4, 4), nn.Sequential(kind(4)), kind(4))
    assert not report.cut_matters(module, 1)
    with pytest.warns(UserWarning) as caught:
        assert [report.cut_matters(module, chunks) for chunks in (2, 3)] == [True, True]
    (warning,) = caught
    assert str(warning.message).startswith(f"'1.0' ({kind.__name__}) is in training mode")
    with pytest.warns(UserWarning):  # without running statistics in any mode
        assert Reporter(0).cut_matters(kind(4, track_running_stats=False).eval(), 2)


UNCUT: dict[str, nn.Module] = {
    "no normalisation": nn.Linear(4, 4),
    "batch norm in evaluation mode": nn.Sequential(nn.BatchNorm1d(4)).eval(),
    "batch norm alone in evaluation mode": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()),
    "of each sample by itself": nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)),
}


@pytest.mark.parametrize("module", UNCUT.values(), ids=UNCUT)
def test_the_cut_does_not_matter_to_what_takes_samples_one_by_one(module: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as caught:
        assert not Reporter(0).cut_matters(module, 2)
    assert caught == []


@pytest.mark.parametrize(
    "samples, chunks, workers, message",
    [
        (3, None, 8, "3 samples for 8 workers: 5 idle"),
        (1, None, 2, "1 sample for 2 workers: 1 idle"),
        (100, 2, 3, "2 chunks for 3 workers: 1 idle"),
        (100, 1, 3, "1 chunk for 3 workers: 2 idle"),
        (2, 2, 3, "2 samples for 3 workers: 1 idle"),
    ],
)
def test_workers_without_work_are_warned_of_once(samples: int, chunks: int | None, workers: int, message: str) -> None:
    report = Reporter(0)
    with pytest.warns(UserWarning) as caught:
        report.idle(samples, chunks, workers)
        report.idle(samples, chunks, workers)
        report.idle(1, 1, workers)
    assert [str(warning.message) for warning in caught] == [message]


@pytest.mark.parametrize("samples, chunks, workers", [(8, None, 8), (9, 9, 8), (1, None, 1), (1, 1, 1), (100, 8, 8)])
def test_as_much_work_as_workers_is_no_concern(samples: int, chunks: int | None, workers: int) -> None:
    report = Reporter(0)
    report.idle(samples, chunks, workers)
    with pytest.warns(UserWarning, match="1 idle"):  # not used up
        report.idle(1, 1, 2)


def test_a_warning_is_of_the_users_line() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with (
        BatchOptimizer(module, nn.MSELoss(), chunk_size=2, optimizer="sgd") as opt,
        pytest.warns(UserWarning) as caught,
    ):
        opt.step(torch.rand(8, 2), torch.rand(8, 2))
        Reporter(0).idle(1, None, 2)
    assert [warning.filename for warning in caught] == [__file__, __file__]


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_what_was_decided_is_said_beside_the_bar_or_in_the_log(
    verbose: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Reporter(verbose)
    report.decided("on cuda:0: 1 recorded")
    report.close()
    assert ("batchopt: on cuda:0: 1 recorded" in capsys.readouterr().err) == (verbose == 1)
    assert [record.message for record in caplog.records] == ["on cuda:0: 1 recorded"] * (verbose == 2)
