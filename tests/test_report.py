"""What is said at each level of `verbose`, and where; warnings of cuts that matter and of idle workers."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

from batchopt import BatchOptimizer

logger = logging.getLogger("batchopt")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a report sets up for good, and end the thread that tqdm starts with its first bar."""
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers.copy()
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers
    if tqdm.monitor is not None:
        tqdm.monitor.exit()


def evaluate(verbose: Any, evaluations: int = 2, **options: Any) -> None:
    module = nn.Linear(4, 2)
    nn.init.zeros_(module.bias)
    with BatchOptimizer(module, nn.MSELoss(), optimizer=None, verbose=verbose, **options) as opt:
        opt.load(torch.zeros(6, 4), torch.full((6, 2), 0.5))  # a loss of 1/4
        for _ in range(evaluations):
            opt.evaluate()


EVALUATION = r"evaluation {}, batch 1: loss 0\.25, \d+\.\d{{3}} ms"
SHARES = [rf"  worker {rank}: 3 samples, \d+\.\d{{3}} ms" for rank in (0, 1)]
RECORDS = {
    0: [],
    1: [],
    2: [EVALUATION.format(1), EVALUATION.format(2)],
    3: [EVALUATION.format(1), *SHARES, EVALUATION.format(2), *SHARES],
}


@pytest.mark.rows
@pytest.mark.parametrize("verbose", RECORDS)
def test_evaluations_are_a_bar_at_one_and_records_above_with_the_shares_of_workers_at_three(
    verbose: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    evaluate(verbose, parallelize=2)
    said = "\n".join(record.message for record in caplog.records if not record.message.startswith("waiting for"))
    assert re.fullmatch("\n".join(RECORDS[verbose]), said)
    assert {(record.name, record.levelname) for record in caplog.records} <= {("batchopt", "INFO")}
    shown = capsys.readouterr()
    assert shown.out == "" and logger.handlers == []
    if verbose == 1:
        assert "batchopt: 2 evaluations" in shown.err and "batch 1, loss 0.25" in shown.err
        assert shown.err.endswith("\n")
    else:
        assert shown.err == ""


@pytest.mark.parametrize("verbose", [2, 3])
def test_without_logging_set_up_records_go_to_stderr_once(verbose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logger.propagate = False  # as if no handler were set up above
    with BatchOptimizer(nn.Linear(4, 2), nn.MSELoss(), optimizer=None, verbose=verbose):
        evaluate(verbose)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("batchopt: evaluation 1, batch 1: loss") == 1


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_what_was_decided_is_said_beside_the_bar_or_in_the_log(
    verbose: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(verbose, 50, chunk_size="auto")
    decided = "evaluations are by this process: "
    assert (f"batchopt: {decided}" in capsys.readouterr().err) == (verbose == 1)
    assert [record.message.startswith(decided) for record in caplog.records].count(True) == (verbose == 2)


def warned(module: nn.Module, samples: int, workers: int, chunk_size: int | None = None, dims: int = 0) -> list[str]:
    """The warnings of two evaluations of so many samples, which are of lines of this file."""
    options: dict[str, Any] = {"parallelize": workers, "chunk_size": chunk_size}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with BatchOptimizer(module, lambda y, _: y.sum(), reduction="sum", optimizer=None, **options) as opt:
            for _ in range(2):
                opt.load(torch.rand(samples, 4, *[2] * dims), torch.rand(samples))
                opt.evaluate()
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


NORMS = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}


@pytest.mark.parametrize("kind", NORMS)
def test_the_cut_matters_to_batch_norm_in_training_mode_and_that_is_said_once_there_is_a_cut(kind: Any) -> None:
    module = nn.Sequential(nn.Identity(), nn.Sequential(kind(4)), kind(4))
    assert warned(module, 6, 1, dims=NORMS[kind]) == []
    (warning,) = warned(module, 6, 1, chunk_size=3, dims=NORMS[kind])
    assert warning.startswith(f"'1.0' ({kind.__name__}) is in training mode")
    # without running statistics in any mode
    (warning,) = warned(kind(4, track_running_stats=False).eval(), 6, 1, chunk_size=3, dims=NORMS[kind])
    assert "keeps no running statistics" in warning


@pytest.mark.rows
@pytest.mark.parametrize(
    "samples, chunk_size, workers, message",
    [
        (1, None, 2, "1 sample for 2 workers: 1 idle"),
        (2, 1, 3, "2 samples for 3 workers: 1 idle"),
        (100, 100, 3, "1 chunk for 3 workers: 2 idle"),
        (2, None, 2, ""),
        (9, 1, 2, ""),
        (1, 1, 1, ""),
    ],
)
def test_workers_without_work_are_warned_of_once(
    samples: int, chunk_size: int | None, workers: int, message: str
) -> None:
    assert warned(nn.Linear(4, 4), samples, workers, chunk_size) == [message] * bool(message)
