"""A training in one call: the order of its parts, and each of its options."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import l1_loss, mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from batchopt import Batches, NonFiniteError
from batchopt.training import Checkpoint, EarlyStopping, Moment, Monitor, Record, fit
from tests.training.common import Killed, batches, data, optimizer

METRICS = {"loss": mse_loss, "l1": l1_loss}


def trained(train: Any = None, **options: Any) -> tuple[str, Any]:
    """The fingerprint, and the state at the end."""
    with optimizer() as opt:
        state = fit(opt, batches() if train is None else train, **options)
        return opt.fingerprint(), state


def test_the_order_of_callbacks_is_mxnets_but_an_epoch_ends_after_its_validation() -> None:
    events: list[tuple[str, int, int, int, list[str]]] = []

    def note(name: str) -> Callable[[Moment], None]:
        def callback(moment: Moment) -> None:
            assert moment.opt.batch_counter == moment.iteration
            events.append((name, moment.epoch, moment.batch, moment.iteration, sorted(moment.numbers)))
            if name == "eval batch":
                assert [len(rows) for rows in moment.output] == [25, 25]

        return callback

    state = trained(
        Batches(data(), 25),
        epochs=2,
        eval_data=Batches(data(), 25),
        metrics=METRICS,
        on_batch=[note("batch"), note("batch again")],
        on_epoch=note("epoch"),
        on_eval_batch=note("eval batch"),
        on_eval=note("eval"),
    )[1]
    found = ["eval_l1", "eval_loss"]
    assert events == [
        event
        for epoch, first in ((1, 1), (2, 3))
        for event in [
            ("batch", epoch, 1, first, ["loss"]),
            ("batch again", epoch, 1, first, ["loss"]),
            ("batch", epoch, 2, first + 1, ["loss"]),
            ("batch again", epoch, 2, first + 1, ["loss"]),
            ("eval batch", epoch, 1, first + 1, []),
            ("eval batch", epoch, 2, first + 1, []),
            ("eval", epoch, 0, first + 1, found),
            ("epoch", epoch, 0, first + 1, [*found, "loss"]),
        ]
    ]
    assert (state.epoch, state.iteration, sorted(state.metrics)) == (2, 4, [*found, "loss"])


def test_a_fit_makes_the_steps_of_a_loop() -> None:
    with optimizer() as opt:
        epochs = batches()
        while epochs.epoch < 2:
            list(opt.steps(epochs))
        expected = opt.fingerprint()
    assert trained(epochs=2)[0] == expected
    assert trained(epochs=2, eval_data=data(), metrics=METRICS, monitor=Monitor(), epoch_0=True)[0] == expected


def test_a_metric_without_other_data_is_of_the_training_data() -> None:
    with optimizer() as opt:
        state = fit(opt, batches(), epochs=1, metrics={"l1": l1_loss})
        assert state.metrics["l1"] == pytest.approx(opt.score(data(), l1_loss), rel=1e-12)
        with pytest.raises(ValueError, match="`metrics` has 'loss'"):  # the mean of the steps is called so
            fit(opt, batches(), epochs=1, metrics=METRICS)


def test_validation_every_second_epoch_and_an_epoch_0_on_request() -> None:
    seen: list[tuple[int, list[str]]] = []
    trained(
        epochs=4,
        eval_data=data(),
        metrics=METRICS,
        score_every=2,
        epoch_0=True,
        on_epoch=lambda moment: seen.append((moment.epoch, sorted(moment.numbers))),
    )
    found = ["eval_l1", "eval_loss"]
    assert seen == [(0, found), (1, ["loss"]), (2, [*found, "loss"]), (3, ["loss"]), (4, [*found, "loss"])]


def test_epochs_that_are_taken_as_done() -> None:
    seen: list[Any] = []

    def note(moment: Moment) -> None:
        seen.append((moment.epoch, moment.batch, moment.iteration))

    position = batches()
    state = trained(position, epochs=4, begin_epoch=3, on_batch=note)[1]
    assert seen == [(4, number, 15 + number) for number in range(1, 6)]
    assert (state.epoch, position.epoch, position.iteration) == (4, 4, 20)
    assert trained(position, epochs=4)[1].iteration == 20  # nothing is left to do
    with pytest.raises(ValueError, match="`begin_epoch` is 3, but these Batches are in epoch 4"):
        trained(position, epochs=5, begin_epoch=3)


@pytest.mark.parametrize("which", ["on_batch", "on_epoch", "on_eval_batch", "on_eval"])
def test_any_callback_can_stop(which: str) -> None:
    options = {"eval_data": data(), "metrics": METRICS, which: lambda moment: True}
    state = trained(epochs=3, **options)[1]
    assert (state.epoch, state.iteration) == (1, 1 if which == "on_batch" else 5)


def test_a_time_limit_stops_and_what_was_reached_is_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert trained(epochs=1, time_limit=float("inf"))[1].epoch == 1
    state = trained(epochs=3, time_limit=1e-9, checkpoint=folder)[1]
    assert state.iteration == 1
    assert [one.iteration for one in Checkpoint(folder).files()] == [1]
    assert trained(epochs=3, checkpoint=folder, resume="auto")[0] == trained(epochs=3)[0]
    trained(epochs=1, checkpoint=tmp_path / "slow", on_batch=lambda moment: time.sleep(0.05))
    state = trained(epochs=2, checkpoint=tmp_path / "slow", resume="auto", time_limit=0.2)[1]
    assert state.iteration == 6  # the seconds of the run before count


def test_early_stopping() -> None:
    values = iter([5.0, 4.0, 4.5, 4.0, 9.0, 1.0])
    state = trained(epochs=6, eval_data=data(), metrics={"loss": lambda outputs, targets: next(values)}, patience=3)[1]
    assert state.epoch == 5


# Schedules


def rates(scheduler: Callable[[Any], Any], step: str, epochs: int = 3) -> list[float]:
    """The learning rate after each batch."""
    found: list[float] = []
    with optimizer() as opt:
        fit(
            opt,
            Batches(data(), 25),
            epochs=epochs,
            scheduler=scheduler(opt.optimizer),
            scheduler_step=step,
            on_batch=lambda moment: found.append(moment.opt.optimizer.param_groups[0]["lr"]),
        )
    return found


def test_schedules_by_epoch_and_by_batch() -> None:
    assert rates(lambda adam: StepLR(adam, 1, 0.1), "epoch") == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
    assert rates(lambda adam: StepLR(adam, 2, 0.1), "batch") == pytest.approx([1e-3, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6])


# What is said


def test_verbose_1_is_a_bar_an_epoch_and_2_a_record(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def run(verbose: int) -> str:
        with optimizer(verbose=verbose) as opt:
            fit(opt, batches(), epochs=2, eval_data=data(), metrics=METRICS)
        return capsys.readouterr().err

    assert run(0) == ""
    said = run(1)
    assert "epoch 1/2" in said and "epoch 2/2: 100%" in said and "eval_l1" in said and "evaluations" not in said
    with caplog.at_level(logging.INFO, "batchopt"):
        run(2)
    assert [r.getMessage().split(":")[0] for r in caplog.records if r.getMessage().startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]


# Errors


def test_what_a_callback_raises_is_raised() -> None:
    def fail(moment: Moment) -> None:
        raise Killed

    for which in ("on_batch", "on_epoch", "on_eval", "on_eval_batch"):
        with pytest.raises(Killed):
            trained(epochs=1, eval_data=data(), metrics=METRICS, **{which: fail})


RECORD = Record("twice.jsonl")


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"epochs": 0}, ValueError, "`epochs` must be >= 1"),
        ({"epochs": 1, "score_every": 0}, ValueError, "`score_every` must be >= 1"),
        ({"epochs": None}, TypeError, "`epochs` must be an int"),
        ({"epochs": 1, "begin_epoch": -1}, ValueError, "`begin_epoch` must be >= 0, got -1"),
        ({"epochs": 1, "begin_epoch": False}, TypeError, "`begin_epoch` must be an int"),
        ({"epochs": 1, "time_limit": -1.0}, ValueError, "`time_limit` must be a positive number of seconds, got -1.0"),
        ({"epochs": 1, "time_limit": "1h"}, TypeError, "`time_limit` must be a positive number of seconds"),
        ({"epochs": 1, "log": [RECORD, RECORD]}, ValueError, "`log` has the same record twice"),
        ({"epochs": 1, "keep": 0, "checkpoint": "c"}, ValueError, "`keep` must be >= 1"),
        ({"epochs": 1, "on_batch": 3}, TypeError, "`on_batch` must be callable"),
        ({"epochs": 1, "on_epoch": [lambda: 1]}, TypeError, "`on_epoch` must be callable"),
        ({"epochs": 1, "on_epoch": None}, TypeError, "`on_epoch` must be a function of a Moment"),
        ({"epochs": 1, "eval_data": data()}, ValueError, "`eval_data` needs `metrics`"),
        ({"epochs": 1, "metrics": mse_loss}, TypeError, "`metrics` must be a dict"),
        ({"epochs": 1, "scheduler": 3}, TypeError, "`scheduler` must be one of torch.optim"),
        ({"epochs": 1, "patience": EarlyStopping("eval_x")}, ValueError, "watches 'eval_x', and epochs end with"),
        ({"epochs": 1, "eval_data": data(), "metrics": {"l1": l1_loss}, "patience": 2}, ValueError, "'eval_loss'"),
        ({"epochs": 1, "resume": "auto"}, ValueError, "`resume` needs `checkpoint`"),
        ({"epochs": 1, "unknown": 1}, TypeError, "unexpected keyword argument 'unknown'"),
    ],
)
def test_wrong_arguments_are_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(**options)


NO_BATCHES: list[Callable[[], Any]] = [
    lambda: (torch.zeros(0, 3), torch.zeros(0, 1)),
    list,
    lambda: Batches((torch.zeros(3, 3), torch.zeros(3, 1)), 10, drop_last=True),
    lambda: DataLoader(TensorDataset(torch.zeros(3, 3), torch.zeros(3, 1)), batch_size=10, drop_last=True),
]


def test_an_epoch_without_batches_is_an_error_that_says_so() -> None:
    with optimizer() as opt:
        for data in NO_BATCHES:
            with pytest.raises(ValueError, match=r"0 samples|leaves them out|empty"):
                fit(opt, data(), epochs=1)


@pytest.mark.parametrize("parallelize", [1, 2])
def test_what_is_not_finite_stops_before_the_parameters_move_and_the_run_can_go_on(parallelize: int) -> None:
    with optimizer(parallelize) as opt:
        fit(opt, Batches(data(), 10), epochs=2)
        expected = opt.fingerprint()
    x, y = data()
    good = x[30].clone()
    seen: list[torch.Tensor] = []
    with optimizer(parallelize) as opt:
        x[30] = torch.nan
        position = Batches((x, y), 10)
        with pytest.raises(NonFiniteError):
            fit(opt, position, epochs=2, on_batch=lambda moment: seen.append(opt.parameters.clone()))
        assert position.iteration == 3 and torch.equal(seen[-1], opt.parameters)
        x[30] = good
        fit(opt, position, epochs=2)
        assert opt.fingerprint() == expected
